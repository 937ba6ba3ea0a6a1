package chart

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// cluster is a kubectl of a cluster with two nodes, for the script: tests/e2e runs it in a real one.
const cluster = `#!/bin/sh
printf '%s\n' "$*" >>"$LOG"
case "$*" in
*"get pods"*component=node*spec.nodeName=worker-2*) echo "s3-csi node-b worker-2" ;;
*"get pods"*component=node*) [ -n "$EMPTY" ] || printf 's3-csi node-a worker-1\ns3-csi node-b worker-2\n' ;;
*"get pods"*component=controller*) [ -n "$EMPTY" ] || echo "s3-csi controller-a worker-1" ;;
*"get pod -n s3-csi node-"*) printf '%s\n' node --state-dir=/run/x --launcher=process --endpoint=unix:///csi/csi.sock --memory-limit=1Gi --config=/etc/c.yaml ;;
*"get pod -n s3-csi controller-"*) printf '%s\n' controller --driver-name=s3.csi.driver --cluster-id=prod --config=/etc/c.yaml --v=2 ;;
*"get pod -n team-a web-0"*nodeName*) printf worker-2 ;;
*"get pod -n team-a web-0"*uid*) printf 0b1f ;;
*"exec -n s3-csi $BROKEN "*) echo "not reachable" >&2; exit 1 ;;
*" status "*"-o name"*) echo key-17 ;;
*" status "*json*) echo '{"version": "v1", "mounts": []}' ;;
*"exec "*) echo "ran $*" ;;
*"logs "*--previous*) echo "no previous container" >&2; exit 1 ;;
*"logs "*) printf 'line about key-17\nline about pods/0b1f/volumes\nline about key-18\n' ;;
*) echo listed ;;
esac
`

// plugin runs kubectl s3csi with a shell, and gives what it printed, the commands that it ran, and its exit code.
func plugin(t *testing.T, shell string, env []string, args ...string) (stdout, stderr string, ran []string, code int) {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "kubectl")
	if err := rig.WriteProgram(program, []byte(cluster)); err != nil {
		t.Fatal(err)
	}
	script, err := filepath.Abs("../../deploy/kubectl-s3csi")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	words := append(strings.Fields(shell), script)
	cmd := exec.CommandContext(ctx, words[0], append(words[1:], args...)...)
	cmd.Dir = dir
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "KUBECTL=" + program, "LOG=" + dir + "/log", "BROKEN=none", "EMPTY="}, env...)
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	if err, exit := cmd.Run(), (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	log, err := os.ReadFile(dir + "/log")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if bundle, err := os.ReadFile(filepath.Join(dir, "bundle.tgz")); err == nil {
		out.Write(bundle)
	}
	return out.String(), problem.String(), strings.Split(string(log), "\n"), cmd.ProcessState.ExitCode()
}

// eachShell runs a test with every POSIX shell of this machine.
func eachShell(t *testing.T, test func(t *testing.T, shell string)) {
	tried := 0
	for _, shell := range []string{"sh", "dash", "bash --posix", "busybox sh"} {
		if _, err := exec.LookPath(strings.Fields(shell)[0]); err != nil {
			continue
		}
		tried++
		t.Run(shell, func(t *testing.T) { test(t, shell) })
	}
	if tried == 0 {
		t.Error("there is no shell")
	}
}

func TestPluginShowsTheMountsOfAllNodes(t *testing.T) {
	eachShell(t, func(t *testing.T, shell string) {
		out, _, ran, code := plugin(t, shell, nil, "mounts")
		if code != 0 || !strings.Contains(out, "# node worker-1\n") || !strings.Contains(out, "# node worker-2\n") {
			t.Errorf("%d: %s", code, out)
		}
		// The running driver's own --state-dir, and no flag that the command does not have.
		if want := "exec -n s3-csi node-a -c s3-csi-driver -- /usr/local/bin/s3-csi-driver status --state-dir=/run/x"; !slices.Contains(ran, want) {
			t.Errorf("it ran %q, not %q", ran, want)
		}
		// A node that does not answer hides no other one.
		out, stderr, _, code := plugin(t, shell, []string{"BROKEN=node-a"}, "mounts", "-o", "json")
		var nodes []struct {
			Node   string
			Status *struct{ Version string }
		}
		if err := json.Unmarshal([]byte(out), &nodes); err != nil || len(nodes) != 2 || nodes[0].Node != "worker-1" || nodes[0].Status != nil ||
			nodes[1].Status == nil {
			t.Errorf("%v: %s", err, out)
		}
		if code == 0 || !strings.Contains(stderr, "worker-1") || strings.Contains(stderr, "worker-2") {
			t.Errorf("%d: %s", code, stderr)
		}
		if _, stderr, _, code := plugin(t, shell, []string{"EMPTY=1"}, "mounts"); code == 0 || !strings.Contains(stderr, "component=node") {
			t.Errorf("without a driver: %d, %s", code, stderr)
		}
	})
}

func TestPluginShowsTheLogsOfAPod(t *testing.T) {
	eachShell(t, func(t *testing.T, shell string) {
		out, stderr, _, code := plugin(t, shell, nil, "logs", "-n", "team-a", "web-0")
		if code != 0 || !strings.Contains(out, "--pod=team-a/web-0 --client-output") || !strings.Contains(out, "about key-17") ||
			!strings.Contains(out, "pods/0b1f") ||
			strings.Contains(out, "key-18") || strings.Contains(out, "node-a") {
			t.Errorf("%d: %s%s", code, out, stderr)
		}
		if _, _, _, code := plugin(t, shell, nil, "logs"); code == 0 {
			t.Error("logs of no pod were shown")
		}
	})
}

func TestPluginChecksAllNodesAndShowsVolumes(t *testing.T) {
	eachShell(t, func(t *testing.T, shell string) {
		_, _, ran, code := plugin(t, shell, nil, "check", "--bucket=data")
		want := "exec -n s3-csi node-b -c s3-csi-driver -- /usr/local/bin/s3-csi-driver check --state-dir=/run/x --launcher=process --config=/etc/c.yaml --node " +
			"--bucket=data"
		if code != 0 || !slices.Contains(ran, want) {
			t.Errorf("%d: it ran %q", code, ran)
		}
		if _, stderr, ran, code := plugin(t, shell, []string{"BROKEN=node-a"}, "check"); code == 0 || !strings.Contains(stderr, "worker-1") ||
			!slices.ContainsFunc(ran, func(s string) bool { return strings.Contains(s, "exec -n s3-csi node-b") }) {
			t.Errorf("%d, %s", code, stderr)
		}
		_, _, ran, code = plugin(t, shell, nil, "volumes", "--all")
		want = "exec -n s3-csi controller-a -c s3-csi-driver -- /usr/local/bin/s3-csi-driver volumes --driver-name=s3.csi.driver --cluster-id=prod " +
			"--config=/etc/c.yaml --all"
		if code != 0 || !slices.Contains(ran, want) {
			t.Errorf("%d: it ran %q", code, ran)
		}
		if _, _, ran, code := plugin(t, shell, nil, "mount"); code != 2 || len(ran) > 1 {
			t.Errorf("an unknown command: %d, %q", code, ran)
		}
	})
}

func TestPluginWritesABundle(t *testing.T) {
	eachShell(t, func(t *testing.T, shell string) {
		out, stderr, ran, code := plugin(t, shell, []string{"BROKEN=node-a"}, "bundle", "bundle.tgz")
		_, archive, ok := strings.Cut(out, "wrote bundle.tgz\n")
		if code != 0 || !ok {
			t.Fatalf("%d: %s", code, stderr)
		}
		zipped, err := gzip.NewReader(strings.NewReader(archive))
		if err != nil {
			t.Fatal(err)
		}
		files := map[string]string{}
		for r := tar.NewReader(zipped); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			if h.Typeflag == tar.TypeReg && h.Mode&0o077 != 0 {
				t.Errorf("%s has mode %o", h.Name, h.Mode)
			}
			files[strings.TrimPrefix(h.Name, "s3csi-bundle/")] = string(text)
		}
		for _, name := range []string{"node-worker-1.status.json", "node-worker-2.status.json", "volumes.json", "node-a.log", "node-b.log", "controller-a.log",
			"errors.txt", "pods.txt"} {
			if _, ok := files[name]; !ok {
				t.Errorf("the bundle has no %s", name)
			}
		}
		if !strings.Contains(files["node-worker-2.status.json"], `"v1"`) || !strings.Contains(files["errors.txt"], "node-worker-1.status.json: not reachable") {
			t.Errorf("%q", files)
		}
		for _, command := range ran {
			for _, never := range []string{"secret", "configmap", "-o yaml", "-o json", "describe"} {
				if strings.Contains(command, never) && !strings.Contains(command, "exec ") && !strings.Contains(command, "-o jsonpath") {
					t.Errorf("the bundle may have secrets, by %q", command)
				}
			}
		}
	})
}
