package node

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

// fleet is a launcher whose helpers are goroutines. Their clients serve real FUSE connections.
type fleet struct {
	mu     sync.Mutex
	units  map[uint32]*unit
	starts int
}

func (f *fleet) Start(_ context.Context, u launcher.Unit) error {
	l, err := net.FileListener(u.Socket)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if old := f.units[u.UID]; old != nil && old.alive() {
		l.Close()
		return fault.Errorf(fault.Exists, "uid %d has processes", u.UID)
	}
	f.starts++
	started := &unit{
		Unit: u, number: f.starts, listener: l.(*net.UnixListener), changed: make(chan struct{}), //nolint:forcetypeassert // the driver's socket is a unix socket
		status: helper.Status{Protocol: helper.ProtocolVersion, Revision: 1, State: helper.StateIdle, Session: &helper.SessionStatus{Salt: []byte("salt")}},
	}
	f.units[u.UID] = started
	started.work.Go(started.serve)
	return nil
}

func (f *fleet) Alive(_ context.Context, uid uint32) (bool, error) {
	u := f.of(uid)
	return u != nil && u.alive(), nil
}

func (f *fleet) Kill(_ context.Context, uid uint32) error {
	if u := f.of(uid); u != nil {
		u.killHelper()
		u.killClient()
		u.work.Wait()
	}
	return nil
}

func (f *fleet) List(context.Context) (list []launcher.UnitInfo, err error) {
	for _, u := range f.all() {
		list = append(list, launcher.UnitInfo{Name: u.Name, UID: u.UID})
	}
	return list, nil
}

func (f *fleet) OOMKills(context.Context, string, uint32) (uint64, error) { return 0, nil }

func (f *fleet) of(uid uint32) *unit {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.units[uid]
}

// all returns the units that have a helper or a client.
func (f *fleet) all() (all []*unit) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, u := range f.units {
		if u.alive() {
			all = append(all, u)
		}
	}
	return all
}

// unit is a helper and its client.
type unit struct {
	launcher.Unit
	number   int // of units that were started before
	listener *net.UnixListener
	work     sync.WaitGroup

	mu      sync.Mutex
	status  helper.Status
	keys    credentials.Keys
	order   credentials.Order
	gone    bool          // the helper has exited
	changed chan struct{} // closed with each change of the status
	fuse    *os.File      // of the running client; nil: none runs
	serving string        // what the client shows
	slow    bool          // the client stays for a while when its mount has ended
	release chan struct{} // ends that
}

func (u *unit) alive() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return !u.gone || u.fuse != nil
}

// serves reports whether there are a helper and a client.
func (u *unit) serves() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return !u.gone && u.fuse != nil
}

// shows returns what the client shows, or has shown.
func (u *unit) shows() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.serving
}

// hasKey reports whether what the client has, or the helper makes its sessions from, are keys with this id.
func (u *unit) hasKey(id string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.order.IsZero() {
		return u.order.Keys.AccessKeyID == id
	}
	return u.keys.AccessKeyID == id
}

// change changes the status. u.mu is held.
func (u *unit) change(change func(*helper.Status)) {
	change(&u.status)
	u.status.Revision++
	close(u.changed)
	u.changed = make(chan struct{})
}

func (u *unit) killHelper() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.gone {
		u.gone = true
		u.listener.Close()
		u.change(func(*helper.Status) {})
	}
}

func (u *unit) killClient() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.exited("killed", -1)
}

// exited notes the exit of the client, if one runs. u.mu is held.
func (u *unit) exited(signal string, code int) {
	if u.fuse == nil {
		return
	}
	u.fuse.Close()
	u.fuse = nil
	if u.release != nil {
		close(u.release)
		u.release = nil
	}
	u.change(func(s *helper.Status) { s.State, s.Signal, s.ExitCode = helper.StateExited, signal, code })
	if u.gone {
		return // nothing records it
	}
	name := helper.FileError
	if code == 0 {
		name = helper.FileExit
	}
	if end, err := json.Marshal(helper.End{Code: code, Signal: signal, When: time.Now(), Starts: u.status.Starts}); err == nil {
		_ = os.WriteFile(filepath.Join(u.StateDir, name), end, 0o600)
	}
}

func (u *unit) serve() {
	for {
		c, err := u.listener.AcceptUnix()
		if err != nil {
			return
		}
		u.work.Go(func() {
			defer c.Close()
			_ = u.answer(c) // a caller that gives up closes its connection
		})
	}
}

// helperRequest is a request in the protocol of package helper.
type helperRequest struct {
	Op    string `json:"op"`
	Since uint64 `json:"since"`
	Start *struct {
		Argv []string `json:"argv"`
	} `json:"start"`
	Keys  credentials.Keys  `json:"keys"`
	Order credentials.Order `json:"order"`
}

func (u *unit) answer(c *net.UnixConn) error {
	req, fuse, err := receiveRequest(c)
	if err != nil {
		return err
	}
	err = u.handle(c, req, fuse)
	u.mu.Lock()
	status := u.status
	u.mu.Unlock()
	reply := map[string]any{"protocol": 1, "status": status}
	if err != nil {
		reply = map[string]any{"protocol": 1, "error": fault.MessageOf(err)}
	}
	body, err := json.Marshal(reply)
	if err == nil {
		_, err = c.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...))
	}
	if req.Op == "quit" {
		u.killHelper()
		u.killClient()
	}
	return err
}

func receiveRequest(c *net.UnixConn) (req helperRequest, fuse *os.File, err error) {
	head, oob := make([]byte, 4), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := c.ReadMsgUnix(head, oob)
	if err != nil {
		return req, nil, err
	}
	if _, err := io.ReadFull(c, head[n:]); err != nil {
		return req, nil, err
	}
	if messages, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(messages) == 1 {
		if fds, err := unix.ParseUnixRights(&messages[0]); err == nil && len(fds) == 1 {
			if err := unix.SetNonblock(fds[0], true); err != nil { // so that Close ends a read
				return req, nil, err
			}
			fuse = os.NewFile(uintptr(fds[0]), "fuse")
		}
	}
	body := make([]byte, binary.BigEndian.Uint32(head))
	if _, err := io.ReadFull(c, body); err != nil {
		return req, fuse, err
	}
	return req, fuse, json.Unmarshal(body, &req)
}

func (u *unit) handle(c *net.UnixConn, req helperRequest, fuse *os.File) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch req.Op {
	case "start":
		if u.fuse != nil || u.status.Ending && u.status.State == helper.StateExited && u.status.ExitCode == 0 {
			fuse.Close()
			return fault.Errorf(fault.Exists, "a client runs, or the mount has ended")
		}
		name, release := shown(req.Start.Argv), make(chan struct{})
		u.fuse, u.serving, u.release = fuse, name, release
		u.take(req)
		u.change(func(s *helper.Status) {
			s.State, s.Signal, s.ExitCode, s.Starts = helper.StateRunning, "", 0, s.Starts+1
		})
		u.work.Go(func() { u.serveFuse(fuse, name, release) })
	case "status":
		for u.status.Revision == req.Since && !u.gone {
			changed := u.changed
			u.mu.Unlock()
			err := awaitEither(c, changed)
			u.mu.Lock()
			if err != nil {
				return err
			}
		}
		if u.gone {
			return c.Close()
		}
	case "credentials":
		u.take(req)
		u.change(func(*helper.Status) {})
	case "forget":
		u.keys, u.order = credentials.Keys{}, credentials.Order{}
	case "flush":
		u.change(func(s *helper.Status) { s.Flush.Asked++; s.Flush.Done = s.Flush.Asked })
	case "end":
		u.change(func(s *helper.Status) { s.Ending = true })
	case "kill":
		u.exited("killed", -1)
	}
	return nil
}

// awaitEither waits until the channel is closed or the caller has closed the connection.
func awaitEither(c *net.UnixConn, changed <-chan struct{}) error {
	left := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		left <- err
	}()
	select {
	case <-changed:
		_ = c.SetReadDeadline(time.Unix(1, 0))
		<-left
		return nil
	case err := <-left:
		return err
	}
}

// take takes over the credentials of a request as helpers do. u.mu is held.
func (u *unit) take(req helperRequest) {
	if req.Keys.IsZero() && req.Order.IsZero() {
		return
	}
	if !req.Keys.IsZero() {
		u.keys = req.Keys
	}
	u.order = req.Order
	session := *u.status.Session
	session.OrderDigest, session.KeysDigest = u.order.Digest(session.Salt), ""
	if u.order.IsZero() {
		session.KeysDigest = credentials.Order{Kind: credentials.AsIs, Keys: u.keys}.Digest(session.Salt)
	} else {
		session.Expires = time.Now().Add(time.Hour)
	}
	u.status.Session = &session
}

// volumePattern matches the prefixes of the model's volumes in a command line.
var volumePattern = regexp.MustCompile(`vol-[0-9]+`)

func shown(argv []string) string {
	for _, arg := range argv {
		if name := volumePattern.FindString(arg); name != "" {
			return name
		}
	}
	return "none"
}

// serveFuse serves a directory with one file of that name, with the smallest part of include/uapi/linux/fuse.h.
func (u *unit) serveFuse(dev *os.File, name string, release <-chan struct{}) {
	buf := make([]byte, 1<<17+4096)
	for {
		n, err := dev.Read(buf)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOENT) {
			continue // the request was interrupted
		}
		if err != nil || n < 40 {
			break
		}
		op, unique := binary.LittleEndian.Uint32(buf[4:]), binary.LittleEndian.Uint64(buf[8:])
		body, errno, silent := answerFuse(op, buf[40:n], name)
		if silent {
			continue
		}
		out := binary.LittleEndian.AppendUint32(nil, uint32(16+len(body)))
		out = binary.LittleEndian.AppendUint32(out, uint32(-int32(errno)))
		_, _ = dev.Write(append(binary.LittleEndian.AppendUint64(out, unique), body...)) // fails if the caller was interrupted
	}
	u.mu.Lock()
	slow := u.slow
	u.mu.Unlock()
	if slow { // uploads
		<-release
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.fuse == dev {
		u.exited("", 0)
	}
}

func answerFuse(op uint32, in []byte, name string) (body []byte, errno unix.Errno, silent bool) {
	switch op {
	case 2, 36, 42: // FORGET, INTERRUPT, BATCH_FORGET
		return nil, 0, true
	case 26: // INIT
		body = make([]byte, 64)
		binary.LittleEndian.PutUint32(body[0:], 7)
		binary.LittleEndian.PutUint32(body[4:], 31)
		copy(body[8:12], in[8:12])
		binary.LittleEndian.PutUint32(body[20:], 4096)
		return body, 0, false
	case 3: // GETATTR
		body = make([]byte, 104)
		binary.LittleEndian.PutUint64(body[16:], 1)
		binary.LittleEndian.PutUint32(body[16+60:], unix.S_IFDIR|0o755)
		binary.LittleEndian.PutUint32(body[16+64:], 1)
		return body, 0, false
	case 17: // STATFS
		return make([]byte, 80), 0, false
	case 27: // OPENDIR
		return make([]byte, 16), 0, false
	case 28: // READDIR
		if binary.LittleEndian.Uint64(in[8:]) > 0 {
			return nil, 0, false
		}
		body = binary.LittleEndian.AppendUint64(nil, 2)
		body = binary.LittleEndian.AppendUint64(body, 1)
		body = binary.LittleEndian.AppendUint32(body, uint32(len(name)))
		body = append(binary.LittleEndian.AppendUint32(body, unix.DT_REG), name...)
		return append(body, make([]byte, -len(body)&7)...), 0, false
	case 18, 29: // RELEASE, RELEASEDIR
		return nil, 0, false
	}
	return nil, unix.ENOSYS, false
}
