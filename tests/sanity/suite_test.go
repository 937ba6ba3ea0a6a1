package sanity_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// envSuite tells a process of this test binary to be the suite: ginkgo runs once in a process, and we need it several times.
const envSuite = "S3CSI_SANITY_SUITE"

// suite is one run of csi-sanity.
type suite struct {
	Address, ControllerAddress string
	Dir                        string // of targets
	Parameters                 map[string]string
	Snapshots                  map[string]string // parameters of snapshots
	SecretsFile                string
	Report                     string // file for the outcomes
}

// outcome is what became of one of csi-sanity's specs.
type outcome struct {
	Name    string // its containers and its own text
	State   types.SpecState
	Message string // why it was skipped or how it failed
	Took    time.Duration
}

// TestSuite is the process that runs csi-sanity; run by itself it does nothing.
func TestSuite(t *testing.T) {
	text := os.Getenv(envSuite)
	if text == "" {
		return
	}
	var s suite
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatal(err)
	}
	ginkgo.ReportAfterSuite("for the test that started this", func(r ginkgo.Report) {
		if err := write(s.Report, r); err != nil {
			ginkgo.Fail(err.Error())
		}
	})
	config := sanity.NewTestConfig()
	config.Address, config.ControllerAddress = s.Address, s.ControllerAddress
	config.TargetPath, config.StagingPath = filepath.Join(s.Dir, "target"), filepath.Join(s.Dir, "staging")
	config.TestVolumeParameters = s.Parameters
	config.TestVolumeMutableParameters = map[string]string{"onDelete": "requireEmpty"}
	config.TestSnapshotParameters = s.Snapshots
	config.SecretsFile = s.SecretsFile
	config.IdempotentCount = 5
	config.TestNodeVolumeAttachLimit = true
	config.CheckPath = checkPath
	sanity.Test(t, config)
}

// checkPath tells what is at a path, and that what seems to be there can be used: a directory must be readable, through
// the mount on it.
func checkPath(path string) (sanity.PathKind, error) {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return sanity.PathIsNotFound, nil
	case err != nil:
		return "", err
	case info.Mode().IsRegular():
		return sanity.PathIsFile, nil
	case !info.IsDir():
		return sanity.PathIsOther, nil
	}
	_, err = os.ReadDir(path)
	return sanity.PathIsDir, err
}

func write(file string, r ginkgo.Report) error {
	var all []outcome
	for _, spec := range r.SpecReports {
		if spec.LeafNodeType != types.NodeTypeIt {
			if spec.Failed() { // a set-up of the whole suite
				all = append(all, outcome{Name: spec.LeafNodeType.String(), State: spec.State, Message: spec.FailureMessage()})
			}
			continue
		}
		message := spec.Failure.Message
		if spec.Failed() {
			message += "\n" + spec.FailureLocation().String() + "\n" + spec.Failure.ForwardedPanic
		}
		name := strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")
		all = append(all, outcome{Name: name, State: spec.State, Message: message, Took: spec.RunTime})
	}
	b, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return os.WriteFile(file, b, 0o600)
}

// run runs csi-sanity in a process of its own.
func (s suite) run(t *testing.T) []outcome {
	t.Helper()
	s.Report = filepath.Join(t.TempDir(), "report.json")
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	ctx := rigtest.Context(t, 5*time.Minute)
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestSuite$", "-test.count=1", "-ginkgo.no-color")
	cmd.Env = append(os.Environ(), envSuite+"="+string(text))
	output, runErr := cmd.CombinedOutput()
	b, err := os.ReadFile(s.Report)
	if err != nil {
		t.Fatalf("csi-sanity did not finish: %v\n%s", errors.Join(runErr, err), output)
	}
	var all []outcome
	if err := json.Unmarshal(b, &all); err != nil {
		t.Fatal(err)
	}
	failed := false
	for _, o := range all {
		failed = failed || o.State.Is(types.SpecStateFailureStates)
	}
	if failed != (runErr != nil) {
		t.Errorf("the process and its report disagree: %v\n%s", runErr, output)
	}
	return all
}

func (o outcome) String() string { return fmt.Sprintf("%s: %s (%s)", o.State, o.Name, o.Took) }
