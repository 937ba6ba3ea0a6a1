package helper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestClientGetsItsDescriptorsAndEnvironmentAndNothingElse(t *testing.T) {
	r := newRig(t)
	s := r.start("fds", "env:AWS_CONFIG_FILE", "env:GREETING", "self", "wait:"+r.dir+"/go")
	if s.State != StateRunning || s.ClientPID == 0 || s.Starts != 1 {
		t.Fatalf("status after start: %+v", s)
	}
	fds := strings.Fields(r.says("fds "))
	if len(fds) != 5 || fds[1] != "0=/dev/null" || !strings.HasPrefix(fds[2], "1=pipe:") ||
		strings.TrimPrefix(fds[2], "1=") != strings.TrimPrefix(fds[3], "2=") || fds[4] != "3=/dev/null" {
		t.Errorf("descriptors: %v", fds)
	}
	if line := r.says("env /"); line != "env /dev/null" {
		t.Errorf("AWS_CONFIG_FILE: %s", line)
	}
	r.says("env hello")
	if line := r.says("self "); !strings.HasSuffix(line, "cwd=/") {
		t.Errorf("working directory: %s", line)
	}
	if pgid, err := unix.Getpgid(s.ClientPID); err != nil || pgid != s.ClientPID {
		t.Errorf("process group %d (%v), want its own, %d", pgid, err, s.ClientPID)
	}
}

func TestUnexpectedExitIsReportedAndAnotherClientCanStart(t *testing.T) {
	r := newRig(t)
	r.start("print:Error: bucket does not exist", "exit:7")
	s := r.until("the exit", exited)
	if s.ExitCode != 7 || s.ClientPID != 0 || len(s.Tail) != 1 || s.Tail[0] != "Error: bucket does not exist" {
		t.Errorf("status: %+v", s)
	}
	end, ok, err := ReadEnd(r.dir)
	if err != nil || !ok || end.Expected || end.Code != 7 || len(end.Tail) != 1 || !strings.Contains(end.Reason, "exit code 7") {
		t.Errorf("%s: %+v, %v, %v", FileError, end, ok, err)
	}
	r.mustLive()

	s = r.start("credentials", "wait:"+r.dir+"/go")
	if s.Starts != 2 || s.State != StateRunning {
		t.Errorf("second start: %+v", s)
	}
	if line := r.says("credentials "); !strings.HasPrefix(line, "credentials 200 AKIDCANARY 2") {
		t.Errorf("second client: %s", line)
	}
	if _, ok, _ := ReadEnd(r.dir); ok {
		t.Error("the first client's end is still on disk")
	}
}

func TestExpectedExitIsRecordedAndTheHelperGoesOnceItWasRead(t *testing.T) {
	r := newRig(t)
	r.start("wait:" + r.dir + "/go")
	if err := r.peer.End(bounded(t)); err != nil {
		t.Fatal(err)
	}
	s := r.until("ending", func(s Status) bool { return s.Ending })
	if s.State != StateRunning {
		t.Errorf("end must not stop the client: %+v", s)
	}
	touch(t, r.dir+"/go")
	s = r.until("the exit", exited)
	if s.ExitCode != 0 || !s.Ending {
		t.Errorf("final status: %+v", s)
	}
	r.mustEnd()
	if _, err := r.peer.Status(bounded(t)); !errors.Is(err, ErrGone) {
		t.Errorf("after the end: %v, want ErrGone", err)
	}
	end, ok, err := ReadEnd(r.dir)
	if err != nil || !ok || !end.Expected || end.Code != 0 || end.Reason != "" || end.Starts != 1 {
		t.Errorf("%s: %+v, %v, %v", FileExit, end, ok, err)
	}
}

func TestHelper_ExitsAfterTheEndWithoutRequests(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.run()
		b.h.end()
		time.Sleep(time.Hour)
		if !b.lives() {
			t.Fatal("it exited before its client")
		}
		b.h.exited(0, "")
		began := time.Now()
		<-b.ended
		if took := time.Since(began); took != endGrace {
			t.Errorf("it exited after %s", took)
		}
		if end, ok, err := ReadEnd(b.h.mount.StateDir); err != nil || !ok || !end.Expected {
			t.Errorf("record: %+v, %v, %v", end, ok, err)
		}
	})
}

func TestHelper_ExitsWhenUnused(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		began := time.Now()
		<-b.ended
		if took := time.Since(began); took != idleLimit {
			t.Errorf("it exited after %s", took)
		}
	})
}

func TestHelper_StaysAfterAnUnexpectedExit(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.run()
		b.h.exited(1, "")
		time.Sleep(24 * time.Hour)
		if !b.lives() {
			t.Error("it exited")
		}
	})
}

func TestStart_IsRefusedAfterEnd(t *testing.T) {
	r := newRig(t)
	if err := r.peer.End(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.tryStart("exit:0"); !fault.Is(err, fault.Precondition) {
		t.Errorf("start after end: %v", err)
	}
	if end, ok, _ := ReadEnd(r.dir); !ok || !end.Expected || end.Starts != 0 {
		t.Errorf("record of a mount that never was: %+v %v", end, ok)
	}
}

// After an abnormal exit while the mount is ending, the helper stays until another client has exited cleanly.
func TestStart_IsAllowedAfterAnAbnormalExitWhileEnding(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.run()
		b.h.exited(1, "")
		b.h.end()
		time.Sleep(24 * time.Hour)
		if !b.lives() {
			t.Fatal("it exited")
		}
		b.run()
		b.h.exited(0, "")
		b.h.delivered(b.status())
		if b.lives() {
			t.Error("it stays")
		}
		if end, ok, err := ReadEnd(b.h.mount.StateDir); err != nil || !ok || !end.Expected || end.Code != 0 || end.Starts != 2 {
			t.Errorf("record: %+v, %v, %v", end, ok, err)
		}
	})
}

func TestSecondStartIsRefusedWhileAClientRuns(t *testing.T) {
	r := newRig(t)
	r.start("wait:" + r.dir + "/go")
	if _, err := r.tryStart("exit:0"); !fault.Is(err, fault.Exists) {
		t.Errorf("second start: %v", err)
	}
}

func TestProgramsThatCannotStart(t *testing.T) {
	r := newRig(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, tc := range []struct {
		argv []string
		kind fault.Kind
	}{
		{[]string{"/nowhere/mount-s3", "x"}, fault.Precondition},
		{[]string{"mount-s3"}, fault.Invalid},
		{nil, fault.Invalid},
		{[]string{r.program, "a\x00b"}, fault.Invalid},
	} {
		_, err := r.peer.Start(bounded(t), StartRequest{Client: "stand-in", Command: client.Command{Argv: tc.argv}, Keys: testKeys}, null)
		if !fault.Is(err, tc.kind) {
			t.Errorf("%q: %v, want kind %d", tc.argv, err, tc.kind)
		}
	}
	if s, err := r.peer.Status(bounded(t)); err != nil || s.State != StateIdle {
		t.Errorf("after failed starts: %+v, %v", s, err)
	}
	r.start("exit:0")
}

func TestSignalsAreIgnoredWhileAClientRuns(t *testing.T) {
	r := newRig(t)
	s := r.start("wait:" + r.dir + "/go")
	r.signals <- syscall.SIGTERM
	r.cancel()
	r.mustLive()
	if err := unix.Kill(s.ClientPID, 0); err != nil {
		t.Errorf("the client: %v", err)
	}
	touch(t, r.dir+"/go")
	r.mustEnd()
}

func TestSignalEndsAHelperWithoutClient(t *testing.T) {
	r := newRig(t)
	r.signals <- syscall.SIGHUP
	r.mustLive()
	r.signals <- syscall.SIGTERM
	r.mustEnd()
}

func TestQuitKillsTheClientAndWhatItStarted(t *testing.T) {
	r := newRig(t)
	s := r.start("ignore", "child", "wait:/nowhere")
	r.says("child <nil>")
	if _, err := r.peer.Quit(bounded(t)); err != nil {
		t.Fatal(err)
	}
	r.mustEnd()
	if err := unix.Kill(-s.ClientPID, 0); !errors.Is(err, unix.ESRCH) && err != nil {
		t.Errorf("the client's process group: %v", err)
	}
	end, ok, err := ReadEnd(r.dir)
	if err != nil || !ok || end.Expected || end.Signal != "SIGKILL" || !strings.Contains(end.Reason, "quit request") {
		t.Errorf("record: %+v, %v, %v", end, ok, err)
	}
}

func TestClient_ChildrenDoNotDelayItsExit(t *testing.T) {
	r := newRig(t)
	r.start("child", "exit:3")
	if s := r.until("the exit", exited); s.ExitCode != 3 {
		t.Errorf("status: %+v", s)
	}
}

func TestQueueIsReportedAndNotKeptAsOutput(t *testing.T) {
	r := newRig(t)
	r.start("print:queue 3 1200", "print:other", "wait:"+r.dir+"/go")
	s := r.until("the queue", func(s Status) bool { return s.Queue != nil })
	if *s.Queue != (client.Queue{Uploads: 3, Bytes: 1200}) {
		t.Errorf("queue: %+v", s.Queue)
	}
	r.says("other")
	if s, _ := r.peer.Status(bounded(t)); len(s.Tail) != 1 {
		t.Errorf("tail: %q", s.Tail)
	}
}

// A flush that was asked for while another was in progress begins after that, so it covers what was queued before it was asked for.
func TestFlush_BeginsAfterItsRequest(t *testing.T) {
	r := newRig(t)
	if _, err := r.peer.Flush(bounded(t)); !fault.Is(err, fault.Precondition) {
		t.Errorf("without a client: %v", err)
	}
	r.start("flushes:"+r.dir+"/go", "print:ready", "wait:/nowhere")
	r.says("ready")
	var asked []int
	for range 3 {
		s, err := r.peer.Flush(bounded(t))
		if err != nil {
			t.Fatal(err)
		}
		asked = append(asked, s.Flush.Asked)
	}
	if want := []int{1, 2, 2}; !slices.Equal(asked, want) {
		t.Errorf("asked %v, want %v", asked, want)
	}
	for done := 1; done <= 2; done++ {
		touch(t, r.dir+"/go")
		s := r.until("a flush", func(s Status) bool { return s.Flush.Done == done })
		if s.Flush != (FlushStatus{Done: done, Asked: 2}) {
			t.Errorf("status %+v", s.Flush)
		}
	}
	if s, err := r.peer.Flush(bounded(t)); err != nil || s.Flush != (FlushStatus{Done: 2, Asked: 3}) {
		t.Errorf("one more: %+v, %v", s.Flush, err)
	}
}

func TestFlush_IsRefusedForClientsWithoutFlushes(t *testing.T) {
	r := newRig(t, func(o *options) {
		o.lookup = func(name string) (client.Client, error) { return client.Client{Name: name}, nil }
	})
	r.start("print:ready", "wait:/nowhere")
	r.says("ready")
	if _, err := r.peer.Flush(bounded(t)); !fault.Is(err, fault.Unsupported) {
		t.Errorf("flush: %v", err)
	}
	r.mustLive()
	if s, err := r.peer.Status(bounded(t)); err != nil || s.State != StateRunning {
		t.Errorf("the client: %+v, %v", s, err)
	}
}

// A helper that forgot its credentials has nothing to serve or to renew, until it gets others.
func TestForget_CredentialsAreNotServedAgain(t *testing.T) {
	r := newRig(t)
	r.start("wait:"+r.dir+"/go", "credentials", "wait:"+r.dir+"/again", "credentials", "wait:/nowhere")
	if err := r.peer.Forget(bounded(t)); err != nil {
		t.Fatal(err)
	}
	s, err := r.peer.Status(bounded(t))
	if err != nil || s.Session.KeysDigest != "" || s.Session.OrderDigest != "" || s.Session.Over || s.Session.Error != "" || !s.Session.Expires.IsZero() {
		t.Errorf("session %+v, %v", s.Session, err)
	}
	touch(t, r.dir+"/go")
	if line := r.says("credentials "); strings.Contains(line, testKeys.AccessKeyID) || strings.HasPrefix(line, "credentials 200") {
		t.Errorf("client: %s", line)
	}
	keys := credentials.Keys{AccessKeyID: "AKIDNEW", SecretAccessKey: "other"}
	if err := r.peer.Renew(bounded(t), keys, credentials.Order{}); err != nil {
		t.Fatal(err)
	}
	touch(t, r.dir+"/again")
	r.says("credentials 200 AKIDNEW ")
}

func TestSecretsNeverReachOutputOrLogs(t *testing.T) {
	r := newRig(t)
	r.start("leak", "shout:and "+testKeys.SecretAccessKey+" again \x1b[31mred", "wait:"+r.dir+"/go")
	if line := r.says("leak "); line != "leak "+redacted+" "+redacted+" "+redacted {
		t.Errorf("tail: %s", line)
	}
	r.says("and " + redacted + " again red")
	log := r.log()
	for _, secret := range []string{testKeys.SecretAccessKey, testKeys.SessionToken, r.h.endpoint.token} {
		if strings.Contains(log, secret) {
			t.Errorf("the log holds a secret:\n%s", log)
		}
	}
	if !strings.Contains(log, "client: leak") {
		t.Errorf("the client's output is not in the log:\n%s", log)
	}
}

func TestReplacedKeysReachTheClient(t *testing.T) {
	r := newRig(t)
	r.start("wait:"+r.dir+"/go", "credentials", "wait:/nowhere")
	keys := credentials.Keys{AccessKeyID: "AKIDNEW", SecretAccessKey: "other", Expires: time.Now().Add(time.Hour)}
	if err := r.peer.Renew(bounded(t), keys, credentials.Order{}); err != nil {
		t.Fatal(err)
	}
	touch(t, r.dir+"/go")
	if line := r.says("credentials "); !strings.HasPrefix(line, "credentials 200 AKIDNEW ") {
		t.Errorf("client: %s", line)
	}
	if err := r.peer.Renew(bounded(t), credentials.Keys{}, credentials.Order{}); !fault.Is(err, fault.Invalid) {
		t.Errorf("no keys: %v", err)
	}
}

func TestStatusWaitsForAChange(t *testing.T) {
	r := newRig(t)
	s, err := r.peer.Status(bounded(t))
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := r.peer.WaitStatus(short, s.Revision); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without a change: %v", err)
	}
	if got, err := r.peer.WaitStatus(bounded(t), s.Revision+100); err != nil || got.Revision != s.Revision {
		t.Errorf("a revision of another helper's: %+v, %v", got, err)
	}
	type answer struct {
		s   Status
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		got, err := r.peer.WaitStatus(bounded(t), s.Revision)
		answers <- answer{got, err}
	}()
	time.Sleep(20 * time.Millisecond)
	r.start("wait:" + r.dir + "/go")
	if a := <-answers; a.err != nil || a.s.Revision <= s.Revision || a.s.State != StateRunning {
		t.Errorf("answer: %+v", a)
	}
}

func TestPeerReportsThatNoHelperAnswers(t *testing.T) {
	dir := t.TempDir()
	if _, err := NewPeer(Dial(dir + "/none")).Status(bounded(t)); !errors.Is(err, ErrGone) {
		t.Errorf("no socket: %v", err)
	}
	f, err := Listen(dir + "/sock")
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(dir + "/sock"); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", fi.Mode(), err)
	}
	if _, err := Listen(dir + "/sock"); err == nil {
		t.Error("a socket was made where one is")
	}
	short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := NewPeer(Dial(dir + "/sock")).Status(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a socket without a helper: %v", err)
	}
	_ = f.Close()
	if _, err := NewPeer(Dial(dir + "/sock")).Status(bounded(t)); !errors.Is(err, ErrGone) {
		t.Errorf("a socket left behind: %v", err)
	}
}

func TestNoDescriptorsAreLeaked(t *testing.T) {
	r := newRig(t)
	r.start("exit:0")
	r.until("the exit", exited)
	before := openFDs(t)
	for range 5 {
		r.start("print:x", "exit:1")
		r.until("the exit", exited)
		if _, err := r.peer.Start(bounded(t), StartRequest{}, r.h.options.stderr); !fault.Is(err, fault.Invalid) {
			t.Errorf("an empty command: %v", err)
		}
	}
	// Connections close a moment after their answers.
	for end := time.Now().Add(5 * time.Second); openFDs(t) > before && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		continue
	}
	if after := openFDs(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestReadEnd_RefusesLinksAndHugeFiles(t *testing.T) {
	for name, plant := range map[string]func(path string) error{
		"symlink":   func(p string) error { return os.Symlink("/etc/passwd", p) },
		"fifo":      func(p string) error { return unix.Mkfifo(p, 0o600) },
		"directory": func(p string) error { return os.Mkdir(p, 0o700) },
		"rubbish":   func(p string) error { return os.WriteFile(p, []byte("{"), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := plant(filepath.Join(dir, FileExit)); err != nil {
				t.Fatal(err)
			}
			if end, ok, err := ReadEnd(dir); err == nil || ok {
				t.Errorf("read %+v", end)
			}
		})
	}
}

// A client that was restarted does not know of the files that the one before could not store.
func TestUnstoredFiles_AreAddedUpUntilTheDriverQuits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	mountpoint, err := client.Get("mountpoint-s3")
	if err != nil {
		t.Fatal(err)
	}
	report := func(before previous, files int) *client.Unstored {
		r.h.output(fmt.Appendf(nil, `s3-csi-unstored {"files":%d,"name":"a\u0007b","reason":"AccessDenied"}`, files), false, mountpoint, before)
		r.h.mu.Lock()
		defer r.h.mu.Unlock()
		return r.h.status.Unstored
	}
	first := report(previous{}, 2)
	if first == nil || *first != (client.Unstored{Files: 2, Name: "ab", Reason: "AccessDenied"}) {
		t.Fatalf("%+v", first)
	}
	if u := report(previous{unstored: first}, 3); u == nil || u.Files != 5 {
		t.Errorf("%+v", u)
	}
	if u := report(previous{unstored: first}, 0); u == nil || u.Files != 2 {
		t.Errorf("%+v", u)
	}
	r.h.mu.Lock()
	r.h.status.State, r.h.status.Ending, r.h.finalRead = StateExited, true, true
	r.h.changeStatus()
	done := r.h.finished
	r.h.mu.Unlock()
	if done {
		t.Error("the helper is done before the driver quits it")
	}
	if u := report(previous{}, 0); u != nil {
		t.Errorf("%+v", u)
	}
}
