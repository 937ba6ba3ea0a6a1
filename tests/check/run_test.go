package check

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"

	checks "github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// everything is a policy that allows everything.
const everything = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":["s3:*"],"Resource":["*"]}]}`

// bound is what one run may take on a busy machine.
const bound = 2 * time.Minute

// command is the driver in mode check with a config file of these backends (YAML, one per line) and the keys in its environment.
func command(t *testing.T, keys credentials.Keys, backends string, args ...string) *exec.Cmd {
	t.Helper()
	bin := os.Getenv(rig.EnvBin)
	if bin == "" {
		t.Skipf("needs the built programs: run make test, or set %s to their directory", rig.EnvBin)
	}
	config := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(config, []byte("backends:\n"+backends), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "s3-csi-driver"), append([]string{"check", "--config=" + config}, args...)...)
	cmd.Env = []string{"AWS_EC2_METADATA_DISABLED=true", "AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null"}
	if !keys.IsZero() {
		cmd.Env = append(cmd.Env, "AWS_ACCESS_KEY_ID="+keys.AccessKeyID, "AWS_SECRET_ACCESS_KEY="+keys.SecretAccessKey)
	}
	return cmd
}

// result is what a run said.
type result struct {
	checks.Report
	code   int
	stderr string
}

// run runs the check to its end, as JSON. Nothing secret may be in what it says.
func run(t *testing.T, keys credentials.Keys, backends string, args ...string) result {
	t.Helper()
	cmd := command(t, keys, backends, append(args, "--output=json")...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if keys.SecretAccessKey != "" && strings.Contains(stdout.String()+stderr.String(), keys.SecretAccessKey) {
		t.Errorf("the secret is in the output:\n%s\n%s", stdout.String(), stderr.String())
	}
	if strings.Contains(stdout.String()+stderr.String(), "%!") {
		t.Errorf("a wrong format verb is in the output:\n%s\n%s", stdout.String(), stderr.String())
	}
	r := result{code: cmd.ProcessState.ExitCode(), stderr: stderr.String()}
	d := json.NewDecoder(&stdout)
	d.DisallowUnknownFields()
	if err := d.Decode(&r.Report); err != nil {
		t.Fatalf("the output is no report: %v\n%s", err, stderr.String())
	}
	return r
}

// table is a section as text: one line "check result", "!" where it is needed and not there.
func table(s checks.Section) string {
	var b strings.Builder
	for _, r := range s.Rows {
		fmt.Fprintf(&b, "%s %s", r.Check, r.Result)
		if r.Needed && r.Result != checks.Yes {
			b.WriteString(" !")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// expect holds the one section of a result against a table.
func expect(t *testing.T, r result, want string) {
	t.Helper()
	if len(r.Sections) != 1 {
		t.Fatalf("%d sections", len(r.Sections))
	}
	var lines strings.Builder
	for line := range strings.Lines(want) {
		if line = strings.TrimSpace(line); line != "" {
			lines.WriteString(line + "\n")
		}
	}
	want = lines.String()
	if got := table(r.Sections[0]); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
		for _, row := range r.Sections[0].Rows {
			t.Logf("%+v", row)
		}
	}
	ok := !strings.Contains(want, "!")
	if r.OK != ok || (r.code == 0) != ok || r.code > 1 {
		t.Errorf("ok %t, exit code %d, want ok %t\n%s", r.OK, r.code, ok, r.stderr)
	}
}

// row finds a row by its name.
func row(t *testing.T, r result, check string) checks.Row {
	t.Helper()
	for _, s := range r.Sections {
		for _, row := range s.Rows {
			if row.Check == check {
				return row
			}
		}
	}
	t.Fatalf("there is no row %s", check)
	return checks.Row{}
}

func client(endpoint, region string, keys credentials.Keys) *s3.Client {
	return s3.New(s3.Options{
		BaseEndpoint: &endpoint, Region: region, UsePathStyle: true,
		Credentials: awscredentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.SecretAccessKey, keys.SessionToken),
	})
}

// nothingLeft fails the test where a check has left a bucket.
func nothingLeft(t *testing.T, c *s3.Client) {
	t.Helper()
	out, err := c.ListBuckets(context.WithoutCancel(t.Context()), &s3.ListBucketsInput{})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range out.Buckets {
		if strings.HasPrefix(aws.ToString(b.Name), checks.BucketPrefix) {
			t.Errorf("bucket %s is left", *b.Name)
		}
	}
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
