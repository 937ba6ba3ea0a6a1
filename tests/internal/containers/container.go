package containers

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers/agent"
	"github.com/s3-csi/s3-csi-driver/tests/internal/output"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

const (
	runtime = "runc"
	// startTimeout and stopTimeout bound what takes a fraction of a second.
	startTimeout = 30 * time.Second
	stopTimeout  = 10 * time.Second
)

// Options say what a container is like.
type Options struct {
	PodUID string // "6f4b…-…"; its cgroup names it
	Cgroup CgroupStyle
	Mounts []Mount
	// Own are files that the container has itself, by their paths in there, below mount points as a rule: who reads one of
	// them there looks past the mount.
	Own           map[string]string
	UserNamespace bool // hostUsers: false
	// Capabilities gives the process those that container runtimes give by default; without, it has none.
	Capabilities bool
	// ReadOnlyRoot is readOnlyRootFilesystem.
	ReadOnlyRoot bool
	// Fuse gives the container the device /dev/fuse, as device plugins do.
	Fuse bool
}

// Container is a running one.
type Container struct {
	PID    int    // of its first process, on the host
	Root   string // its own root directory, on the host, without the mounts
	Cgroup string // its cgroup's path

	t      testing.TB
	dir    string
	id     string
	stderr output.Buffer
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	done   chan struct{} // closed when its output has ended

	mu      sync.Mutex
	encoder *json.Encoder
	last    uint64
	waiting map[uint64]chan agent.Answer // of requests with one answer
	watches map[uint64]*Watch
}

// Need skips a test that cannot run containers on this machine.
func Need(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it runs containers")
	}
	if _, err := exec.LookPath(runtime); err != nil {
		t.Skipf("needs %s: make setup installs it", runtime)
	}
	if bin := os.Getenv(rig.EnvBin); bin == "" {
		t.Skipf("needs the built programs: run make test, or set %s to their directory", rig.EnvBin)
	} else if _, err := os.Stat(agentProgram()); err != nil {
		t.Skip("needs the containers' program: make test-parts builds it")
	}
}

func agentProgram() string { return filepath.Join(os.Getenv(rig.EnvBin), "test", "container-agent") }

// Start runs a container and returns when its process answers. It ends with the test, which fails if anything is left of it.
func Start(t testing.TB, o Options) *Container {
	t.Helper()
	Need(t)
	c, err := start(t, o)
	if err != nil {
		t.Fatalf("starting a container: %v", err)
	}
	return c
}

func start(t testing.TB, o Options) (_ *Container, err error) {
	dir, err := os.MkdirTemp("", "s3csi-container-") //nolint:usetesting // other users pass through it, which a test's own does not let them
	if err != nil {
		return nil, err
	}
	c := &Container{
		t: t, dir: dir, id: filepath.Base(dir), Root: filepath.Join(dir, "rootfs"), done: make(chan struct{}),
		waiting: map[uint64]chan agent.Answer{}, watches: map[uint64]*Watch{},
	}
	c.Cgroup = o.Cgroup.path(o.PodUID, c.id)
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Errorf("stopping a container: %v", err)
		}
	})
	if err := c.bundle(o); err != nil {
		return nil, err
	}
	if err := c.run(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if _, err := c.ask(ctx, agent.Request{Op: agent.OpList, Path: "/"}); err != nil {
		return nil, errors.Join(err, errors.New(c.stderr.String()))
	}
	// The runtime writes the file beside and renames it, after it has let the process go.
	var body []byte
	for {
		if body, err = os.ReadFile(c.pidFile()); err == nil {
			break
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return nil, fmt.Errorf("the runtime has not said its process: %w", err)
		}
	}
	c.PID, err = strconv.Atoi(strings.TrimSpace(string(body)))
	return c, err
}

// bundle makes the runtime's directory of the container.
func (c *Container) bundle(o Options) error {
	for _, d := range []string{c.dir, c.Root} {
		if err := errors.Join(os.MkdirAll(d, 0o755), os.Chmod(d, 0o755)); err != nil {
			return err
		}
	}
	program, err := os.ReadFile(agentProgram())
	if err != nil {
		return err
	}
	if err := rig.WriteProgram(filepath.Join(c.Root, "agent"), program); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(c.Root, "proc"), 0o755); err != nil {
		return err
	}
	for path, content := range o.Own {
		path = filepath.Join(c.Root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, []byte(content), 0o666)); err != nil {
			return err
		}
	}
	if o.UserNamespace {
		if err := c.giveAway(); err != nil {
			return err
		}
	}
	config, err := json.Marshal(o.spec(c.id, c.Root))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.dir, "config.json"), config, 0o600)
}

// giveAway makes the root directory one of the user namespace's root.
func (c *Container) giveAway() error {
	root, err := os.OpenRoot(c.Root)
	if err != nil {
		return err
	}
	defer root.Close()
	return fs.WalkDir(root.FS(), ".", func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, root.Lchown(path, userNamespaceBase, userNamespaceBase))
	})
}

func (c *Container) pidFile() string { return filepath.Join(c.dir, "pid") }

func (c *Container) state() string { return filepath.Join(c.dir, "state") }

// run starts the runtime, which stays beside the container. The container's process ends with its input, and that with this
// process.
func (c *Container) run() error {
	c.cmd = exec.CommandContext(context.Background(), runtime, "--root", c.state(), "run", "--bundle", c.dir, "--pid-file", c.pidFile(), c.id)
	c.cmd.Dir, c.cmd.Stderr = "/", &c.stderr
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.cmd.Start(); err != nil {
		return err
	}
	c.stdin, c.encoder = stdin, json.NewEncoder(stdin)
	go c.listen(stdout)
	return nil
}

// listen hands out the answers until there are no more.
func (c *Container) listen(out io.Reader) {
	defer close(c.done)
	for lines := bufio.NewReader(out); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var answer agent.Answer
		if err := json.Unmarshal(line, &answer); err != nil {
			continue // the runtime's own words
		}
		c.mu.Lock()
		if w := c.watches[answer.ID]; w != nil {
			w.add(answer)
		} else if ch := c.waiting[answer.ID]; ch != nil {
			ch <- answer // it has room for one
			delete(c.waiting, answer.ID)
		}
		c.mu.Unlock()
	}
}

// ask has the agent do something once. The error is that of the container, or of ctx; the answer's own is in the answer.
func (c *Container) ask(ctx context.Context, req agent.Request) (agent.Answer, error) {
	ch := make(chan agent.Answer, 1)
	c.mu.Lock()
	c.last++
	req.ID = c.last
	c.waiting[req.ID] = ch
	err := c.encoder.Encode(req)
	c.mu.Unlock()
	if err != nil {
		return agent.Answer{}, fmt.Errorf("the container takes no requests: %w", err)
	}
	select {
	case a := <-ch:
		return a, nil
	case <-c.done:
		return agent.Answer{}, errors.New("the container has ended")
	case <-ctx.Done():
		return agent.Answer{}, fmt.Errorf("the container does not answer (%s %s): %w", req.Op, req.Path, ctx.Err())
	}
}

// Read reads a file in the container.
func (c *Container) Read(ctx context.Context, path string) (string, error) {
	a, err := c.ask(ctx, agent.Request{Op: agent.OpRead, Path: path})
	return a.Content, errors.Join(err, a.Err())
}

// Write writes a file in the container.
func (c *Container) Write(ctx context.Context, path, content string) error {
	a, err := c.ask(ctx, agent.Request{Op: agent.OpWrite, Path: path, Content: content})
	return errors.Join(err, a.Err())
}

// List lists a directory in the container.
func (c *Container) List(ctx context.Context, path string) ([]string, error) {
	a, err := c.ask(ctx, agent.Request{Op: agent.OpList, Path: path})
	return a.Names, errors.Join(err, a.Err())
}

// Nest starts a process in the container that is the root of user and mount namespaces of its own, as "unshare -Urm" does. What
// Nested asks for is done there.
func (c *Container) Nest(ctx context.Context) error {
	a, err := c.ask(ctx, agent.Request{Op: agent.OpNest})
	return errors.Join(err, a.Err())
}

// Nested has the nested process do something: one of agent's operations.
func (c *Container) Nested(ctx context.Context, op, path, content string) (agent.Answer, error) {
	a, err := c.ask(ctx, agent.Request{Op: op, Path: path, Content: content, Nested: true})
	return a, errors.Join(err, a.Err())
}

// Stop ends the container and takes everything of it away. Stopping it again does nothing.
func (c *Container) Stop() error {
	if c.dir == "" {
		return nil
	}
	var errs []error
	if c.stdin != nil {
		_ = c.stdin.Close() // the agent ends
		select {
		case <-c.done:
		case <-time.After(stopTimeout):
			errs = append(errs, errors.New("its process did not end by itself"))
		}
		ended := time.AfterFunc(stopTimeout, func() {
			if c.PID > 0 {
				_ = unix.Kill(c.PID, unix.SIGKILL)
			}
			_ = c.cmd.Process.Kill()
		})
		if err := c.cmd.Wait(); err != nil {
			errs = append(errs, fmt.Errorf("%w: %s", err, c.stderr.String()))
		}
		ended.Stop()
	}
	errs = append(errs, removeCgroup(c.Cgroup), os.RemoveAll(c.dir))
	c.dir = ""
	return errors.Join(errs...)
}
