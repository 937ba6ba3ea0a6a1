package helper

import (
	"context"
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// bubble is a helper with a fake clock, without a socket and without processes: tests call its methods instead.
type bubble struct {
	t       *testing.T
	h       *helper
	svc     *tokenService
	signals chan os.Signal
	ended   chan struct{} // closed when it would exit
	log     string
}

func inBubble(t *testing.T, test func(t *testing.T, b *bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{t: t, svc: &tokenService{life: time.Hour}, signals: make(chan os.Signal, 1), ended: make(chan struct{}), log: t.TempDir() + "/log"}
		log, err := os.Create(b.log)
		if err != nil {
			t.Fatal(err)
		}
		o := testOptions(t.TempDir(), log)
		o.exchange, o.idleLimit, o.endGrace = b.svc.make, idleLimit, endGrace
		if b.h, err = newHelper(o); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		renewed := make(chan struct{})
		go func() { defer close(renewed); b.h.renew(ctx) }()
		go func() { defer close(b.ended); b.h.serveUntilDone(t.Context(), b.signals) }()
		test(t, b)
		cancel()
		b.h.quit()
		<-renewed
		<-b.ended
		_, _ = b.h.endpoint.listener.Close(), log.Close()
	})
}

// run is the start of a client.
func (b *bubble) run() {
	b.h.mu.Lock()
	defer b.h.mu.Unlock()
	b.h.status.State, b.h.status.ExitCode, b.h.status.Signal = StateRunning, 0, ""
	b.h.status.Starts++
	b.h.changeStatus()
	b.h.wakeRenewal()
}

// start runs a client with keys that are valid for a while, if life is not 0, and an order.
func (b *bubble) start(life time.Duration, order credentials.Order) {
	b.t.Helper()
	keys := credentials.Keys{}
	if life != 0 {
		keys = testKeys
		keys.Expires = time.Now().Add(life)
	}
	if err := b.h.credentials(keys, order); err != nil {
		b.t.Fatal(err)
	}
	b.run()
}

func (b *bubble) status() Status {
	s, _ := b.h.snapshot()
	return s
}

// until waits for a status.
func (b *bubble) until(what string, ok func(s Status) bool) Status {
	b.t.Helper()
	for {
		s, changed := b.h.snapshot()
		if ok(s) {
			return s
		}
		select {
		case <-changed:
		case <-time.After(24 * time.Hour):
			b.t.Fatalf("timed out waiting for %s: %+v", what, s)
		}
	}
}

// has asks for credentials like the client.
func (b *bubble) has() (status int, key string) {
	b.t.Helper()
	line, body := b.h.endpoint.respond([]byte("GET " + endpointPath + " HTTP/1.1\r\nAuthorization: " + b.h.endpoint.token + "\r\n\r\n"))
	number, _, _ := strings.Cut(line, " ")
	status, err := strconv.Atoi(number)
	if err != nil {
		b.t.Fatalf("status %q", line)
	}
	var answer struct{ AccessKeyID string }
	if err := json.Unmarshal(body, &answer); err != nil {
		b.t.Fatal(err)
	}
	return status, answer.AccessKeyID
}

func (b *bubble) logged() string {
	b.t.Helper()
	text, err := os.ReadFile(b.log)
	if err != nil {
		b.t.Fatal(err)
	}
	return string(text)
}

func (b *bubble) lives() bool {
	synctest.Wait()
	select {
	case <-b.ended:
		return false
	default:
		return true
	}
}
