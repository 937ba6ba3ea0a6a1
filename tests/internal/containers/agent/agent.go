// Package agent is the process of a test's container: it executes the requests on its standard input and says on its standard
// output how that went, in lines of JSON. It ends with its input.
package agent

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
)

// The operations.
const (
	OpRead  = "read"  // the content of a file
	OpWrite = "write" // replaces a file's content
	OpList  = "list"  // the names in a directory
	OpWatch = "watch" // reads a file repeatedly, and opens it each time
	OpStop  = "stop"  // ends the watch of that number

	// OpNest starts another agent in user and mount namespaces of its own, as "unshare -Urm" does. Requests that are Nested go
	// to that one.
	OpNest    = "nest"
	OpBind    = "bind"    // binds Content to Path
	OpRemount = "remount" // makes the bind mount at Path writable
	OpFuse    = "fuse"    // mounts a FUSE file system at Path whose source is Content; no request of it is ever answered
	OpDrop    = "drop"    // ends the FUSE file systems that the agent has mounted
)

// Pause is the time between two looks of a watch.
const Pause = 2 * time.Millisecond

// maxContent bounds what is read of a file, in bytes.
const maxContent = 64 << 10

// Request is one line of the input.
type Request struct {
	ID      uint64 `json:"id"`
	Op      string `json:"op"`
	Path    string `json:"path,omitempty"`
	Content string `json:"content,omitempty"`
	Nested  bool   `json:"nested,omitempty"`
}

// Answer is one line of the output. Watches give one for each look.
type Answer struct {
	ID      uint64          `json:"id"`
	Began   time.Time       `json:"began"`
	Ended   time.Time       `json:"ended"`
	Stalls  pressure.Stalls `json:"stalls"` // when it ended
	Content string          `json:"content,omitempty"`
	Names   []string        `json:"names,omitempty"`
	Device  uint64          `json:"device,omitempty"` // of the file that was read
	Errno   uint32          `json:"errno,omitempty"`
	Error   string          `json:"error,omitempty"`
}

// Err is the error that the answer tells, which can be compared with errno values; nil: it went well.
func (a Answer) Err() error {
	switch {
	case a.Errno != 0:
		return fmt.Errorf("%s (%w)", a.Error, syscall.Errno(a.Errno))
	case a.Error != "":
		return errors.New(a.Error)
	}
	return nil
}

// End is the moment when it ended.
func (a Answer) End() pressure.Moment { return pressure.Moment{Time: a.Ended, Stalls: a.Stalls} }

// OK reports whether it went well.
func (a Answer) OK() bool { return a.Err() == nil }

type agent struct {
	mu    sync.Mutex // of out
	out   *json.Encoder
	stops map[uint64]chan struct{}
	inner *json.Encoder // of the nested agent
	fuse  []int         // descriptors of /dev/fuse
}

// Run serves until in ends.
func Run(in io.Reader, out io.Writer) error {
	a := &agent{out: json.NewEncoder(out), stops: map[uint64]chan struct{}{}}
	for lines := bufio.NewReader(in); ; {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil // what still runs ends with the process
		}
		if err != nil {
			return err
		}
		var req Request
		if err := json.Unmarshal(line, &req); err != nil {
			return err
		}
		a.handle(req)
	}
}

func (a *agent) handle(req Request) {
	if req.Nested && a.inner != nil {
		req.Nested = false
		_ = a.inner.Encode(req) // one that has ended answers nothing
		return
	}
	switch req.Op {
	case OpNest, OpFuse, OpDrop:
		began := time.Now()
		a.say(answerOf(req, began, a.change(req)))
	case OpWatch:
		stop := make(chan struct{})
		a.stops[req.ID] = stop
		go a.repeat(req, stop)
	case OpStop:
		if stop := a.stops[req.ID]; stop != nil {
			close(stop)
			delete(a.stops, req.ID)
		}
	default:
		go func() { a.say(do(req)) }() // a file system that hangs holds up nothing else
	}
}

func (a *agent) repeat(req Request, stop <-chan struct{}) {
	req.Op = OpRead
	for {
		a.say(do(req))
		select {
		case <-stop:
			return
		case <-time.After(Pause):
		}
	}
}

func (a *agent) say(answer Answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	_ = a.out.Encode(answer) // without a reader this process ends soon
}

func do(req Request) Answer {
	answer := Answer{ID: req.ID, Began: time.Now()}
	var err error
	switch req.Op {
	case OpRead:
		answer.Content, answer.Device, err = read(req.Path)
	case OpWrite:
		err = os.WriteFile(req.Path, []byte(req.Content), 0o666)
	case OpBind:
		err = bind(req.Content, req.Path)
	case OpRemount:
		err = unix.Mount("", req.Path, "", unix.MS_REMOUNT|unix.MS_BIND, "")
	case OpList:
		var entries []fs.DirEntry
		entries, err = os.ReadDir(req.Path)
		for _, e := range entries {
			answer.Names = append(answer.Names, e.Name())
		}
	default:
		err = fmt.Errorf("there is no operation %q", req.Op)
	}
	return answer.end(err)
}

// answerOf is the answer to a request that only succeeds or fails.
func answerOf(req Request, began time.Time, err error) Answer {
	return Answer{ID: req.ID, Began: began}.end(err)
}

// end fills in how it went.
func (a Answer) end(err error) Answer {
	a.Ended, a.Stalls = time.Now(), pressure.Read()
	if err != nil {
		a.Error = err.Error()
		if errno := syscall.Errno(0); errors.As(err, &errno) {
			a.Errno = uint32(errno)
		}
	}
	return a
}

func read(path string) (content string, device uint64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	var st syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &st); err != nil {
		return "", 0, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxContent))
	return string(b), st.Dev, err
}
