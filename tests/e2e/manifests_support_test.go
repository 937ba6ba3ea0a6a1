package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const (
	root      = "../.."
	deployDir = root + "/deploy"
	variants  = root + "/tests/chart/testdata"
)

// shell runs a command line as an administrator of the cluster does, with kubectl and helm on the PATH, and gives what it writes to
// both of its outputs.
func shell(ctx context.Context, t testing.TB, in, line string) (out, errs string, err error) {
	t.Helper()
	bin := filepath.Join(world.Dir, "bin")
	for name, program := range map[string]string{"kubectl": os.Getenv("KUBECTL"), "helm": os.Getenv("HELM")} {
		if err := errors.Join(os.MkdirAll(bin, 0o700), symlink(program, filepath.Join(bin, name))); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", line)
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "KUBECONFIG="+world.Kubeconfig(), "HOME="+world.Dir,
		"HELM_CACHE_HOME="+world.Dir, "HELM_CONFIG_HOME="+world.Dir, "HELM_DATA_HOME="+world.Dir)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in), &stdout, &stderr
	if err = cmd.Run(); err != nil {
		err = fmt.Errorf("%s: %w: %s", line, err, stderr.String())
	}
	return stdout.String(), stderr.String(), err
}

func symlink(to, name string) error {
	to, err := filepath.Abs(to)
	if err != nil {
		return err
	}
	if err := os.Symlink(to, name); !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

// dryRun lets the API server judge objects strictly, and gives its warnings.
func dryRun(ctx context.Context, t testing.TB, objects string) (warnings string, err error) {
	t.Helper()
	out, warnings, err := shell(ctx, t, objects, "kubectl apply --dry-run=server --validate=strict -f -")
	if err == nil && !strings.Contains(out, "(server dry run)") {
		err = fmt.Errorf("nothing was judged: %q", out)
	}
	return warnings, err
}

// judged fails the test where the API server does not take objects as they are, or warns of anything else than is expected.
func judged(t *testing.T, objects, warning string) {
	t.Helper()
	warnings, err := dryRun(t.Context(), t, objects)
	if err != nil {
		t.Error(err)
	} else if warnings != warning {
		t.Errorf("it says %q", warnings)
	}
}

// rendered is what helm makes of the chart for a release that is not installed. A driver of the name that is installed would be
// changed, which some fields of its object do not allow: then it gets another name.
func rendered(t *testing.T, namespace string, args ...string) string {
	t.Helper()
	// The pod of helm test needs the service account, which is not there.
	args = append([]string{"template", "variant", chart, "--namespace", namespace, "--skip-tests"}, args...)
	out, err := world.Helm(t.Context(), args...)
	if regexp.MustCompile(`(?m)^kind: CSIDriver\nmetadata:\n  name: ` + regexp.QuoteMeta(csiName) + `$`).MatchString(out) {
		args = append(args, "--set", "driverName=variant.csi.driver")
	}
	if err == nil {
		out, err = world.Helm(t.Context(), append(args, "--dry-run=server")...) // for the API server as it is
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// tokensInContext is what the API server says of a driver that is installed for older ones.
const tokensInContext = "Warning: spec.serviceAccountTokenInSecrets is unset; if supported by this CSI driver, set to true to prevent possible logging of " +
	"tokens in volume attributes\n"

// warned are the variants and overlays that are to be warned of, and the warning.
var warned = map[string]string{"before-1.35": tokensInContext, "tokens-in-context": tokensInContext}
