package mount

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// uids is a launcher that starts nothing, with the uids that have processes.
type uids struct {
	mu     sync.Mutex
	alive  map[uint32]bool
	killed []uint32
	onKill func(uid uint32) // may be nil
}

func (l *uids) Start(context.Context, launcher.Unit) error { return nil }

func (l *uids) Alive(_ context.Context, uid uint32) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.alive[uid], nil
}

func (l *uids) Free(ctx context.Context, uid uint32) (bool, error) {
	alive, err := l.Alive(ctx, uid)
	return !alive, err
}

func (l *uids) Kill(_ context.Context, uid uint32) error {
	if l.onKill != nil {
		l.onKill(uid)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.alive, uid)
	l.killed = append(l.killed, uid)
	return nil
}

func (l *uids) List(context.Context) (list []launcher.UnitInfo, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for uid := range l.alive {
		list = append(list, launcher.UnitInfo{UID: uid})
	}
	return list, nil
}

// OOMKills gives no answer, as a systemd that hangs.
func (l *uids) OOMKills(ctx context.Context, _ string, _ uint32) (uint64, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

// s3 is a backend.
type s3 struct {
	access error // of every try of the keys
	wide   error // of every proof that they reach no further
}

func (s3) Backend(name string) (backend.Backend, error) {
	return backend.Backend{Name: name, Endpoint: "https://moved.example"}, nil
}

// CheckClaims agrees with nobody who says anything.
func (s3) CheckClaims(name string, claims []volume.Claim) error {
	if len(claims) > 0 {
		return fault.Errorf(fault.Precondition, "%s is not what backend %s is", claims[0].Field, name)
	}
	return nil
}

func (s3) Changed() <-chan struct{} { return nil }

func (s s3) CheckAccess(context.Context, backend.Backend, credentials.Keys, string, string, string, string) (backend.BucketInfo, error) {
	return backend.BucketInfo{Region: "there"}, s.access
}

func (s s3) ProveScope(context.Context, backend.Backend, credentials.Keys, string, string, string, string, string) error {
	return s.wide
}

// tokens is a token service, and the planner in front of it. Without an account it has nothing to exchange, and keys are used as
// they are.
type tokens struct {
	mu      sync.Mutex
	kind    credentials.Kind // of all orders; "": AsIs
	refuse  error            // of every session
	nothing error            // of every plan
	planned []session.Request
	made    []credentials.Order
}

func (f *tokens) Plan(_ context.Context, r session.Request) (credentials.Order, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.planned = append(f.planned, r)
	keys := r.Keys
	if r.Source == credentials.SourceDriver {
		keys = credentials.Keys{AccessKeyID: "a", SecretAccessKey: "b"}
	}
	kind := f.kind
	if kind == "" {
		kind = credentials.AsIs
	}
	o := credentials.Order{Kind: kind, Keys: keys, RoleARN: r.RoleARN, Name: r.Name, Duration: r.Duration}
	for _, t := range r.Tokens {
		o.Token = t.Value
	}
	return o, f.nothing
}

func (f *tokens) Make(_ context.Context, o credentials.Order) (credentials.Keys, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if o.Kind == credentials.AsIs {
		return o.Keys, nil
	}
	f.made = append(f.made, o)
	if f.refuse != nil {
		return credentials.Keys{}, f.refuse
	}
	return credentials.Keys{AccessKeyID: fmt.Sprint("ASIA", len(f.made)), SecretAccessKey: "s", SessionToken: "t", Expires: time.Now().Add(time.Hour)}, nil
}

// sessions is how many were asked for.
func (f *tokens) sessions() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.made)
}

// newTestManager is a manager without anything behind it.
func newTestManager(t *testing.T, l Launcher, b Backends) *Manager {
	t.Helper()
	m := newManager(Options{
		Namespace: host.Own(), Launcher: l, Backends: b, Sessions: &tokens{}, Client: client.Get, DefaultClient: "mountpoint-s3",
		UIDs: UIDRange{5000, 5001}, MountTimeout: time.Minute, Heal: true,
	})
	dir, err := os.MkdirTemp("", "m") //nolint:usetesting // sockets' paths are short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = unix.Unmount(filepath.Join(dir, "state", "fusectl"), unix.MNT_DETACH) // where the host has none
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	m.store = store{dir: filepath.Join(dir, "state"), cache: filepath.Join(dir, "cache")}
	if err := m.store.prepare(); err != nil {
		t.Fatal(err)
	}
	m.StateDir, m.CacheDir = m.store.dir, m.store.cache
	m.ctl = host.NewFusectl(m.Namespace, m.store.dir+"/fusectl")
	return m
}

// mountOf makes the directories and the record of a mount that runs, as far as anybody can tell by them.
func mountOf(t *testing.T, m *Manager, letter, generation, client string) record {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: a mount's directories belong to its own user")
	}
	name := strings.Repeat(letter, 24) + "-" + generation
	rec := record{
		Name: name, Key: keyOf(name), Phase: phaseRunning, VolumeID: "v", Source: sourceName("v", name), Client: client, UID: 5000,
		Spec: Spec{Backend: "default", Bucket: "b", Source: credentials.SourceDriver}, Command: cmd("/bin/true"),
	}
	if err := m.store.make(rec); err != nil {
		t.Fatal(err)
	}
	return rec
}

func cmd(argv ...string) client.Command { return client.Command{Argv: argv} }

// helperOf answers for a mount's helper with a status, or not at all, and notes what it was asked.
type helperOf struct {
	mu     sync.Mutex
	asked  []string
	given  []given
	status *helper.Status // nil: it does not answer
	onGive func(*helper.SessionStatus)
}

// given is what a helper was given to work with.
type given struct {
	Keys  *credentials.Keys  `json:"keys"`
	Order *credentials.Order `json:"order"`
}

// take does with it what a helper does that makes sessions. The status is another then.
func (h *helperOf) take(g given) {
	h.given = append(h.given, g)
	if h.status == nil || h.status.Session == nil {
		return
	}
	status, session := *h.status, *h.status.Session
	session.OrderDigest = ""
	if g.Order != nil {
		session.OrderDigest = g.Order.Digest(session.Salt)
	}
	if h.onGive != nil {
		h.onGive(&session)
	}
	status.Revision++
	status.Session = &session
	h.status = &status
}

// got is what it was given so far.
func (h *helperOf) got() []given {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.given)
}

func (h *helperOf) wasAsked(op string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Contains(h.asked, op)
}

// until is a context that ends once that has come to pass: what is to be cut short after it gets the time that it takes to get there.
func until(t *testing.T, happened func() bool) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() {
		for ctx.Err() == nil && !happened() {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	})
	return ctx
}

// serve listens where the mount's helper does. A status that was seen stays what it is.
func (h *helperOf) serve(t *testing.T, m *Manager, name string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: m.store.socket(name), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	over := make(chan struct{})
	t.Cleanup(func() { close(over); l.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				if err := h.answer(c, over); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
					t.Log("a helper's answer:", err)
				}
			})
		}
	})
}

func (h *helperOf) answer(c net.Conn, over <-chan struct{}) error {
	var size [4]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return err
	}
	body := make([]byte, binary.BigEndian.Uint32(size[:]))
	if _, err := io.ReadFull(c, body); err != nil {
		return err
	}
	var req struct {
		Op    string `json:"op"`
		Since uint64 `json:"since"`
		given
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return err
	}
	h.mu.Lock()
	h.asked = append(h.asked, req.Op)
	if req.Op == "credentials" {
		h.take(req.given)
	}
	status := h.status
	h.mu.Unlock()
	if status == nil || req.Op == "status" && req.Since == status.Revision {
		go func() { <-over; c.Close() }()
		_, err := c.Read(make([]byte, 1)) // until whoever asked has given up
		return err
	}
	reply, err := json.Marshal(map[string]any{"protocol": 1, "status": status})
	if err != nil {
		return err
	}
	_, err = c.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(reply))), reply...))
	return err
}

func mustBackend(t *testing.T, m *Manager) backend.Backend {
	t.Helper()
	be, err := m.Backends.Backend("default")
	if err != nil {
		t.Fatal(err)
	}
	return be
}
