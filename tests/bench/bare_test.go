package bench

import (
	"encoding/json"
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
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// bare starts and stops a client without the driver. Its directories are on the file systems that the driver's are on.
type bare struct {
	node    *rigtest.Node
	command client.Command
	uid     int
	dir     string // the mount point
	cache   string
	process *os.Process

	template client.Command // with places for the directories
	// mounts means that it executes fusermount3 or fusermount, as root, instead of getting a FUSE descriptor.
	mounts bool
}

// newBare makes one that does what the driver did for the only mount of the node: the command is read from that mount's
// record. Only what must differ is changed: the cache and home directories, and the keys are in the environment.
func newBare(b *testing.B, n *rigtest.Node) *bare {
	b.Helper()
	records, err := filepath.Glob(filepath.Join(n.State, "mounts", "*", "mount.json"))
	if err != nil || len(records) != 1 {
		b.Fatalf("want the record of one mount: %v, %v", records, err)
	}
	text, err := os.ReadFile(records[0])
	if err != nil {
		b.Fatal(err)
	}
	var record struct{ Command client.Command }
	if err := json.Unmarshal(text, &record); err != nil {
		b.Fatal(err)
	}
	if len(record.Command.Argv) == 0 {
		b.Fatalf("%s has no command", records[0])
	}
	name := filepath.Base(filepath.Dir(records[0]))
	own := strings.NewReplacer(filepath.Join(n.Cache, name), placeCache, filepath.Join(n.State, "mounts", name, "state"), placeHome)
	var command client.Command
	for _, a := range record.Command.Argv {
		command.Argv = append(command.Argv, own.Replace(a))
	}
	for _, e := range record.Command.Env {
		command.Env = append(command.Env, own.Replace(e))
	}
	if command.Fusermount = record.Command.Fusermount; command.Fusermount != "" {
		command.Env = append(slices.DeleteFunc(command.Env, func(e string) bool { return strings.HasPrefix(e, "PATH=") }), "PATH=/usr/bin:/bin")
	}
	keys := n.Process.Keys()
	command.Env = append(command.Env, "AWS_ACCESS_KEY_ID="+keys.AccessKeyID, "AWS_SECRET_ACCESS_KEY="+keys.SecretAccessKey)
	return bareOf(b, n, command, 0)
}

// bareUID is the first user id of bare clients: not of a node, whose driver ends what it did not start.
const bareUID = 2400000

// What stands in a command for a client's own directories.
const (
	placeCache = "{cache}"
	placeHome  = "{home}"
)

// bareOf makes the bare client of that number from a command.
func bareOf(b *testing.B, n *rigtest.Node, command client.Command, number int) *bare {
	b.Helper()
	work := filepath.Join(n.Dir, fmt.Sprintf("bare-%d", number))
	c := &bare{node: n, uid: bareUID + number, dir: filepath.Join(n.Dir, "targets", fmt.Sprintf("bare-%d", number)), cache: filepath.Join(work, "cache"),
		template: command}
	home := filepath.Join(work, "home")
	if command.Fusermount != "" {
		c.mounts, c.uid, c.dir = true, 0, filepath.Join(home, client.Mountpoint)
	}
	for _, dir := range []string{c.dir, home} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			b.Fatal(err)
		}
	}
	if err := os.Chown(home, c.uid, c.uid); err != nil {
		b.Fatal(err)
	}
	own := strings.NewReplacer(placeCache, c.cache, placeHome, home)
	for _, a := range command.Argv {
		c.command.Argv = append(c.command.Argv, own.Replace(a))
	}
	for _, e := range command.Env {
		c.command.Env = append(c.command.Env, own.Replace(e))
	}
	b.Cleanup(func() {
		if c.process != nil {
			_ = c.process.Kill()
			_ = unix.Unmount(c.dir, unix.MNT_DETACH)
			_, _ = c.process.Wait()
		}
	})
	return c
}

// start returns when the root of the file system has been read. The cache is new and empty, as a new mount's is.
func (c *bare) start() error {
	if err := os.RemoveAll(c.cache); err != nil {
		return err
	}
	if err := os.MkdirAll(c.cache, 0o700); err != nil {
		return err
	}
	if err := os.Chown(c.cache, c.uid, c.uid); err != nil {
		return err
	}
	if c.mounts {
		return c.startMounting()
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("/dev/fuse: %w", err)
	}
	fuse := os.NewFile(uintptr(fd), "/dev/fuse")
	defer fuse.Close()
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,allow_other,default_permissions,max_read=1048576", fd, c.uid, c.uid)
	if err := unix.Mount("s3csi:bare", c.dir, "fuse", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, options); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	c.process, err = os.StartProcess(c.command.Argv[0], c.command.Argv, &os.ProcAttr{
		Dir: "/", Env: c.command.Env, Files: []*os.File{null, null, null, fuse},
		Sys: &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: uint32(c.uid), Gid: uint32(c.uid)}},
	})
	if err != nil {
		return errors.Join(err, unix.Unmount(c.dir, unix.MNT_DETACH))
	}
	fuse.Close() // or the exit of the client would not end the wait below
	return readRoot(c.dir)
}

// startMounting starts a client that mounts itself.
func (c *bare) startMounting() error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	before, err := device(c.dir)
	if err != nil {
		return err
	}
	c.process, err = os.StartProcess(c.command.Argv[0], c.command.Argv, &os.ProcAttr{
		Dir: "/", Env: c.command.Env, Files: []*os.File{null, null, null}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return err
	}
	for began := time.Now(); ; time.Sleep(200 * time.Microsecond) {
		switch now, err := device(c.dir); {
		case err != nil:
			return err
		case now != before:
			return readRoot(c.dir)
		case time.Since(began) > mountBound:
			return fmt.Errorf("%s: the client has not mounted within %s", c.dir, mountBound)
		}
	}
}

// mountBound is how long a client may take to mount.
const mountBound = 20 * time.Second

// device is the file system of a directory.
func device(dir string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", dir, err)
	}
	return st.Dev, nil
}

// stop unmounts and waits for the client's end: everything is stored then.
func (c *bare) stop() error {
	var err error
	for range 500 { // the kernel lets go of closed files a moment later
		if err = unix.Unmount(c.dir, 0); !errors.Is(err, unix.EBUSY) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("unmounting %s: %w", c.dir, err)
	}
	state, err := c.process.Wait()
	c.process = nil
	if err == nil && !state.Success() {
		err = fmt.Errorf("the client ended: %s", state)
	}
	return err
}

// readRoot waits for the first entries of a directory, which come from S3.
func readRoot(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Readdirnames(1)
	return err
}
