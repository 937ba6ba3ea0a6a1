// Package mounttest has stateful fakes for tests of the packages below package mount: the launcher, S3, the token service and helpers.
package mounttest

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Programs is the directory of the clients' programs, all of which can run.
type Programs string

func (p Programs) Path(_ context.Context, c client.Client) (string, error) {
	return filepath.Join(string(p), c.Programs[0]), nil
}

// UIDs is a launcher that starts nothing, with the uids that have processes.
type UIDs struct {
	mu     sync.Mutex
	Live   map[uint32]bool
	Killed []uint32
	OnKill func(uid uint32) // may be nil
}

func (l *UIDs) Start(context.Context, launcher.Unit) error { return nil }

func (l *UIDs) Alive(_ context.Context, uid uint32) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Live[uid], nil
}

func (l *UIDs) Kill(_ context.Context, uid uint32) error {
	if l.OnKill != nil {
		l.OnKill(uid)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.Live, uid)
	l.Killed = append(l.Killed, uid)
	return nil
}

func (l *UIDs) List(context.Context) (list []launcher.UnitInfo, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for uid := range l.Live {
		list = append(list, launcher.UnitInfo{UID: uid})
	}
	return list, nil
}

// OOMKills does not answer, like an unresponsive systemd.
func (l *UIDs) OOMKills(ctx context.Context, _ string, _ uint32) (uint64, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

// S3 is a backend.
type S3 struct {
	Access error // of every try of the keys
	Wide   error // of every proof that they reach no further
}

func (S3) Backend(name string) (backend.Backend, error) {
	return backend.Backend{Name: name, Endpoint: "https://moved.example"}, nil
}

// CheckClaims refuses all claims.
func (S3) CheckClaims(name string, claims []volume.Claim) error {
	if len(claims) > 0 {
		return fault.Errorf(fault.Precondition, "%s is not what backend %s is", claims[0].Field, name)
	}
	return nil
}

func (S3) Changed() <-chan struct{} { return nil }

func (s S3) CheckAccess(context.Context, backend.Backend, backend.Access) (backend.BucketInfo, error) {
	return backend.BucketInfo{Region: "there"}, s.Access
}

func (s S3) ProveScope(context.Context, backend.Backend, backend.Access) error {
	return s.Wide
}

// Tokens is a token service with its planner.
type Tokens struct {
	mu      sync.Mutex
	Kind    credentials.Kind // of all orders; "": AsIs
	Refuse  error            // of every session
	Nothing error            // of every plan
	Planned []session.Request
	Made    []credentials.Order
}

func (f *Tokens) Plan(_ context.Context, r session.Request) (credentials.Order, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Planned = append(f.Planned, r)
	keys := r.Keys
	if r.Source == credentials.SourceDriver {
		keys = credentials.Keys{AccessKeyID: "a", SecretAccessKey: "b"}
	}
	kind := f.Kind
	if kind == "" {
		kind = credentials.AsIs
	}
	o := credentials.Order{Kind: kind, Keys: keys, RoleARN: r.RoleARN, Name: r.Name, Duration: r.Duration}
	for _, t := range r.Tokens {
		o.Token = t.Value
	}
	return o, f.Nothing
}

func (f *Tokens) Make(_ context.Context, o credentials.Order) (credentials.Keys, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if o.Kind == credentials.AsIs {
		return o.Keys, nil
	}
	f.Made = append(f.Made, o)
	if f.Refuse != nil {
		return credentials.Keys{}, f.Refuse
	}
	return credentials.Keys{AccessKeyID: fmt.Sprint("ASIA", len(f.Made)), SecretAccessKey: "s", SessionToken: "t", Expires: time.Now().Add(time.Hour)}, nil
}

// Sessions returns the number of sessions that were requested.
func (f *Tokens) Sessions() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.Made)
}

// Helper answers for a mount's helper with a status, or not at all, and records its requests.
type Helper struct {
	Mu     sync.Mutex
	Asked  []string
	given  []Given
	Status *helper.Status // nil: it does not answer
	OnGive func(*helper.SessionStatus)
}

// Given is the credentials in a request to a helper.
type Given struct {
	Keys  *credentials.Keys  `json:"keys"`
	Order *credentials.Order `json:"order"`
}

// take changes the status as a helper that makes sessions does.
func (h *Helper) take(g Given) {
	h.given = append(h.given, g)
	if h.Status == nil || h.Status.Session == nil {
		return
	}
	status, session := *h.Status, *h.Status.Session
	session.OrderDigest = ""
	if g.Order != nil {
		session.OrderDigest = g.Order.Digest(session.Salt)
	}
	if h.OnGive != nil {
		h.OnGive(&session)
	}
	status.Revision++
	status.Session = &session
	h.Status = &status
}

// Given returns the credentials that the helper has received so far.
func (h *Helper) Given() []Given {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	return slices.Clone(h.given)
}

// WasAsked reports whether the helper got a request with this operation.
func (h *Helper) WasAsked(op string) bool {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	return slices.Contains(h.Asked, op)
}

// Process starts a process of a uid, which exits when exit is called. Wait for it.
func Process(t *testing.T, uid uint32) (process *exec.Cmd, exit func()) {
	t.Helper()
	process = exec.CommandContext(t.Context(), "cat")
	process.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	stdin, err := process.StdinPipe()
	if err == nil {
		err = process.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return process, func() { stdin.Close() }
}

// Until returns a context that ends as soon as something has happened.
func Until(t *testing.T, happened func() bool) context.Context {
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

// Serve listens on a helper's socket until the test ends.
func (h *Helper) Serve(t *testing.T, socket string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
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

func (h *Helper) answer(c net.Conn, over <-chan struct{}) error {
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
		Given
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return err
	}
	h.Mu.Lock()
	h.Asked = append(h.Asked, req.Op)
	if req.Op == "credentials" {
		h.take(req.Given)
	}
	status := h.Status
	h.Mu.Unlock()
	if status == nil || req.Op == "status" && req.Since == status.Revision {
		go func() { <-over; c.Close() }()
		_, err := c.Read(make([]byte, 1)) // until the caller gives up
		return err
	}
	reply, err := json.Marshal(map[string]any{"protocol": 1, "status": status})
	if err != nil {
		return err
	}
	_, err = c.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(reply))), reply...))
	return err
}

// Request returns a request for the prefix pvc-1/ of a bucket, with the driver's own credentials.
func Request() mount.Request {
	return mount.Request{
		VolumeID: "default:bucket/pvc-1/", Target: "/t", Volume: volume.ID{Backend: "default", Bucket: "bucket", Prefix: "pvc-1/"},
		Source: credentials.SourceDriver,
	}
}
