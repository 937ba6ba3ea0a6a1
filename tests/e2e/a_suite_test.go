//go:build !lane || shared

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// suiteRun is one run of the suite's program.
type suiteRun struct {
	client string
	test   string // the one that it runs; "": all that are not known
	known  []string

	specs []spec // that were not skipped
	err   error
}

// do runs the program.
func (r *suiteRun) do(ctx context.Context, dir string) {
	skip := suiteSkipped(r.client)
	focus := regexp.QuoteMeta(suiteName + r.test) // of a text that begins with the name of Ginkgo's suite
	if r.test != "" {
		focus += "$"
	} else {
		for _, test := range r.known {
			skip = append(skip, regexp.QuoteMeta(suiteName+test)+"$")
		}
	}
	definition, err := filepath.Abs(definitionOf(r.client))
	if err != nil {
		r.err = err
		return
	}
	ctx, cancel := context.WithTimeout(ctx, suiteTimeout)
	defer cancel()
	report := filepath.Join(dir, "report.json")
	cmd := exec.CommandContext(ctx, world.Program("storage-e2e.test"),
		"-kubeconfig="+world.Kubeconfig(), "-provider=local", "-storage.testdriver="+definition,
		"-ginkgo.focus="+focus, "-ginkgo.skip="+strings.Join(skip, "|"), "-ginkgo.json-report="+report)
	cmd.Dir = dir
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it cleans up, and reports
	cmd.WaitDelay = time.Minute
	out, ran := cmd.CombinedOutput()
	text, err := os.ReadFile(report)
	var suites []struct{ SpecReports []spec }
	if err == nil {
		err = json.Unmarshal(text, &suites)
	}
	if err != nil || len(suites) != 1 {
		r.err = fmt.Errorf("%d reports: %w: %w: %s", len(suites), err, ran, tail(string(out)))
		return
	}
	for _, s := range suites[0].SpecReports {
		if s.State != "skipped" && s.State != "pending" {
			r.specs = append(r.specs, s)
		}
	}
	if ran != nil && !slices.ContainsFunc(r.specs, func(s spec) bool { return s.State != "passed" }) {
		r.err = fmt.Errorf("%w: %s", ran, tail(string(out)))
	}
}

// snapshotContents returns the VolumeSnapshotContents that are there. One that has not been asked to go, or that is annotated as being created, is
// left by the programs of external-snapshotter and not by the driver.
func snapshotContents() string {
	out,
		err := try("get",
		"volumesnapshotcontents",
		"-o",
		`jsonpath={range .items[*]}{.metadata.name}: handle {.status.snapshotHandle}, policy {.spec.deletionPolicy}, deleted {.metadata.deletionTimestamp}, `+
			`annotations {.metadata.annotations}, error {.status.error.message}{"\n"}{end}`)
	if err != nil {
		return err.Error()
	}
	return out
}

func tail(text string) string { return text[max(0, len(text)-8000):] }

// TestExternalStorage runs Kubernetes' own tests of storage drivers, with both clients. The tests that have to pass are those that
// testdata/external-storage/passing-*.txt list; one that is not listed and is not skipped for a reason given there must not run.
//
// Each is a run of its own, several at a time. So are those that call themselves serial: they are about pods and volumes of their own.
// All of them together take longest of the parallel tests. The name of this file makes this the first that go test starts.
func TestExternalStorage(t *testing.T) {
	t.Parallel()
	need(t)
	if err := world.SuiteImages(t.Context()); err != nil {
		t.Fatal(err)
	}
	namedBucket(t, suiteBucket)
	namedBucket(t, inlineBucket)
	_, err := world.s3.SetRole(t.Context(), s3server.Role{Name: inlineRole, Policy: everything, Trust: s3server.Trust{
		Issuers: []s3server.TrustedIssuer{{URL: world.issuer.URL(), Audiences: []string{audience}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	// Those of snapshots are the tests' own, which make them without parameters.
	attributes, err := os.ReadFile("testdata/external-storage/volumeattributesclass.yaml")
	if err != nil {
		t.Fatal(err)
	}
	apply(t, "", string(attributes))
	t.Cleanup(func() { remove(t, "volumeattributesclass", "", suiteBucket) })
	var runs []*suiteRun
	for _, client := range suiteClients {
		class, err := os.ReadFile("testdata/external-storage/storageclass-" + client + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		apply(t, "", string(class))
		t.Cleanup(func() { remove(t, "storageclass", "", "external-storage-"+client) })
		known := suitePassing(t, client)
		runs = append(runs, &suiteRun{client: client, known: known})
		for _, test := range known {
			runs = append(runs, &suiteRun{client: client, test: test})
		}
	}
	// What takes long begins early, and what takes minutes first.
	weight := func(r *suiteRun) int {
		switch {
		case strings.Contains(r.test, "snapshottable-stress"):
			return 0
		case strings.Contains(r.test, "restarting containers"):
			return 1
		case r.test == "" || strings.Contains(r.test, "[Slow]"):
			return 2
		}
		return 3
	}
	slices.SortStableFunc(runs, func(a, b *suiteRun) int { return weight(a) - weight(b) })

	queue := make(chan *suiteRun)
	var workers sync.WaitGroup
	for range suiteRuns {
		workers.Go(func() {
			for r := range queue {
				r.do(t.Context(), t.TempDir())
			}
		})
	}
	for _, r := range runs {
		queue <- r
	}
	close(queue)
	workers.Wait()

	passed := map[string][]string{}
	for _, r := range runs {
		t.Run(r.client+"/"+r.test, func(t *testing.T) {
			if r.err != nil {
				t.Error(r.err)
			}
			for _, s := range r.specs {
				if s.State != "passed" {
					t.Errorf("%s %s after %.1f s: %s\n%s", s.name(), s.State, s.RunTime.Seconds(), s.Failure.Message, tail(s.CapturedGinkgoWriterOutput))
					continue
				}
				t.Logf("%.1f s", s.RunTime.Seconds())
				passed[r.client] = append(passed[r.client], s.name())
				if r.test == "" && !*update {
					t.Errorf("it is not listed and passes: %s; go test ./e2e -run 'ExternalStorage|Docs' -update lists it", s.name())
				}
			}
			if r.test != "" && len(r.specs) != 1 {
				t.Errorf("%d tests have run", len(r.specs))
			}
		})
	}
	if *update {
		for _, client := range suiteClients {
			writeSuitePassing(t, client, passed[client])
		}
	}

	eventually(t, "the suite's namespaces to be gone", func() error {
		if all := list(t, "namespaces", "", "-l", "e2e-framework"); len(all) > 0 {
			return fmt.Errorf("%d are there, %s", len(all), all[0].Metadata.Name)
		}
		return nil
	})
	volumesGone(t, suiteBucket)
	eventually(t, "the snapshots' objects to be gone", func() error {
		const snapshots = ".s3-csi/snapshots/"
		left := slices.DeleteFunc(keys(t, suiteBucket, snapshots), func(key string) bool {
			return !strings.Contains(strings.TrimPrefix(key, snapshots), "/") // the record, which is a tombstone
		})
		if len(left) > 0 {
			return fmt.Errorf("%s; their VolumeSnapshotContents: %s", strings.Join(left, ", "), snapshotContents())
		}
		return nil
	})
	for _, key := range keys(t, suiteBucket, "") {
		if !strings.HasPrefix(key, ".s3-csi/") {
			t.Errorf("left in S3: %s", key)
		}
	}
}
