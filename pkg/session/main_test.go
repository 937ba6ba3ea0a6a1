package session

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// runMode is the mode in a process of its own, which tells at its end what it is shut off from.
func runMode() {
	err := Main(context.Background(), "v2", os.Stdin, os.Stdout)
	dumpable, _ := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	var core unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_CORE, &core)
	fmt.Fprintf(os.Stderr, "dumpable %d core %d %d error %v", dumpable, core.Cur, core.Max, err)
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// mode runs it with what is to be said on its standard input, once it is ready.
func mode(t *testing.T, order string) (line, complaint string, err error) {
	t.Helper()
	cmd := exec.CommandContext(bounded(t), os.Args[0])
	cmd.Env = []string{asMode + "=1"}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	r := bufio.NewReader(out)
	if ready, err := r.ReadString('\n'); ready != "ready\n" {
		t.Errorf("it said %q, %v before it was given anything", ready, err)
	}
	if _, err := io.WriteString(in, order); err != nil {
		t.Error(err)
	}
	if order == "" {
		_ = in.Close()
	}
	line, _ = r.ReadString('\n')
	rest, _ := io.ReadAll(r)
	if len(rest) > 0 {
		t.Errorf("behind its answer it said %q", rest)
	}
	_ = in.Close()
	err = cmd.Wait()
	return line, stderr.String(), err
}

func ordered(t *testing.T, o credentials.Order) string {
	t.Helper()
	b, err := json.Marshal(o)
	must(t, err)
	return string(b) + "\n"
}

func TestTheModeAnswersOneOrderInOneLine(t *testing.T) {
	f := serveSTS(t, issueForAnHour)
	line, complaint, err := mode(t, ordered(t, orderFor(credentials.WebIdentity, f.url)))
	if err != nil {
		t.Fatalf("%v: %s", err, complaint)
	}
	if !strings.Contains(complaint, "dumpable 0 core 0 0 ") {
		t.Errorf("others of its user can look into it: %s", complaint)
	}
	if agent := f.requests()[0].UserAgent(); !strings.Contains(agent, "s3-csi-driver/v2") {
		t.Errorf("the user agent is %q", agent)
	}
	var r credentials.Reply
	if err := json.Unmarshal([]byte(line), &r); err != nil || r.Error != nil || r.Keys == nil || r.Keys.SessionToken != "new-token" || r.Keys.Expires.IsZero() {
		t.Errorf("it answered %q, %v", line, err)
	}
}

func TestTheModeRepliesWithKinds(t *testing.T) {
	for code, want := range map[string]fault.Kind{"AccessDenied": fault.Denied, "InvalidIdentityToken": fault.Unauthenticated,
		"PackedPolicyTooLarge": fault.Precondition} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			f := serveSTS(t, func(w http.ResponseWriter, _ asked, _ int) { refuseSTS(w, 400, code, "no to "+token) })
			line, complaint, err := mode(t, ordered(t, orderFor(credentials.WebIdentity, f.url)))
			var r credentials.Reply
			if err != nil || json.Unmarshal([]byte(line), &r) != nil || r.Keys != nil || r.Error == nil {
				t.Fatalf("it answered %q, %v: %s", line, err, complaint)
			}
			if r.Error.Kind != want || !strings.Contains(r.Error.Text, "backend x") || strings.Contains(line, "canary") {
				t.Errorf("it answered %q", line)
			}
		})
	}
}

func TestInvalidOrdersAreNotRepeated(t *testing.T) {
	for _, order := range []string{"", "canary\n", "{}\n", `{"kind":7,"token":"canary"}` + "\n", "[\"canary\"]\n"} {
		line, complaint, err := mode(t, order)
		if err == nil || line != "" || strings.Contains(complaint, "canary") || !strings.Contains(complaint, "not an order") {
			t.Errorf("%q: it answered %q, %v: %s", order, line, err, complaint)
		}
	}
}

func FuzzOrderIsReadWithoutPanic(f *testing.F) {
	f.Add(`{"kind":"asIs","keys":{"accessKeyID":"a","secretAccessKey":"b"}}`)
	f.Add(`{"kind":"webIdentity","sts":{"ca":"x"}}`)
	f.Fuzz(func(t *testing.T, text string) {
		var o credentials.Order
		if json.Unmarshal([]byte(text), &o) != nil {
			return
		}
		if again, err := json.Marshal(o); err != nil || !json.Valid(again) {
			t.Fatalf("%v: %s", err, again)
		}
		for _, s := range o.Secrets() {
			if len(s) > 3 && strings.Contains(scrub(o, "x "+s+" y"), s) && !strings.Contains("x … y", s) {
				t.Fatalf("%q is shown", s)
			}
		}
	})
}
