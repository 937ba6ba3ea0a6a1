// Package rig sets up a real driver with real clients on this machine, for tests, benchmarks and the demo, and takes
// everything away again: processes, mounts, directories.
package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
)

// EnvBin names the directory where make put the programs.
const EnvBin = "S3CSI_BIN"

// EnvMountpoint names another program of the client mountpoint-s3 than the one that is built here, such as AWS's mount-s3.
const EnvMountpoint = "MOUNT_S3"

// OwnMountpoint is the program of the client mountpoint-s3 that is built here.
const OwnMountpoint = "s3-csi-mountpoint"

// Programs returns the file names of the clients' programs, by the names that volumes give them.
func Programs() map[string]string {
	mountpoint := OwnMountpoint
	if given := os.Getenv(EnvMountpoint); given != "" && filepath.Base(given) != OwnMountpoint {
		mountpoint = "mount-s3"
	}
	return map[string]string{"rclone": "s3-csi-rclone", "mountpoint-s3": mountpoint}
}

// Mountpoint returns the program of the client mountpoint-s3, or an error that says why there is none.
func Mountpoint(bin string) (program string, err error) {
	program = os.Getenv(EnvMountpoint)
	if program == "" {
		program = filepath.Join(bin, OwnMountpoint)
	}
	if _, err := os.Stat(program); err != nil {
		return "", fmt.Errorf("needs the client mountpoint-s3, which make builds where Rust is installed: %w", err)
	}
	return program, nil
}

// EnvLauncher says which launcher rigs' drivers use, LauncherProcess or LauncherSystemd. Without it, it is the former.
const EnvLauncher = "S3CSI_LAUNCHER"

// The launchers.
const (
	LauncherProcess = "process"
	LauncherSystemd = "systemd"
)

// The user ids that mounts get: of all rigs that live at the same time in a network namespace, each has a block of its own,
// because a user id is how a mount's processes are found.
const (
	firstUID = 2100000
	// hostUID is the first of rigs outside of the tests' namespaces, such as the demo's: they see, and kill, the processes of rigs inside.
	hostUID   = 2300000
	uidBlock  = 1000
	uidBlocks = 100
)

// The driver's programs, by their names in the directory of the built ones and in the rig's.
const (
	driverProgram = "s3-csi-driver"
	helperProgram = "s3-csi-helper"
)

// S3 is the service that a rig's driver uses as its backend "default".
type S3 struct {
	Endpoint string
	Region   string
	Keys     credentials.Keys
}

// Rig is one node's worth of directories and drivers. Its methods are for one goroutine.
type Rig struct {
	Dir     string // everything but the state directory; other users may pass through it
	State   string // --state-dir
	Cache   string // --cache-dir
	Clients string // --client-dir
	S3      S3
	// Launcher is --launcher.
	Launcher string
	HostDir  string // --host-dir, where systemd finds the programs; "": the flag is not given, to a driver without it
	// Program is the driver's; helpers are made of the one beside it.
	Program string
	// Isolation are IsolationFlags, which nodes' drivers get; nil: none.
	Isolation []string
	// Wrapper is a command that drivers are started through, such as "nsenter -t 12 --mount", whose end is theirs.
	Wrapper []string

	// FirstUID and LastUID are --uid-range.
	FirstUID, LastUID int

	units   bool      // this host's systemd is there for the rig
	uids    io.Closer // keeps the block
	mu      sync.Mutex
	drivers []*Driver
	sockets int
}

// Usable says why a rig cannot work on this machine; nil: it can.
func Usable() error {
	if os.Getuid() != 0 {
		return errors.New("needs root: it mounts file systems and starts processes as other users")
	}
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("needs FUSE: %w", err)
	}
	return f.Close()
}

// New makes the directories and installs the programs, which must be executable for other users wherever the checkout is.
func New(s3 S3) (*Rig, error) {
	bin := os.Getenv(EnvBin)
	if bin == "" {
		return nil, fmt.Errorf("needs the built programs: set %s to their directory (make sets it)", EnvBin)
	}
	l, err := launcher()
	if err != nil {
		return nil, err
	}
	base := ""
	if l == LauncherSystemd {
		base = "/var/lib" // units have a /tmp of their own, and their users none of the homes
	}
	dir, err := os.MkdirTemp(base, "s3csi-")
	if err != nil {
		return nil, err
	}
	r := &Rig{Dir: dir, S3: s3, Launcher: l, units: l == LauncherSystemd, Cache: filepath.Join(dir, "cache"), Clients: filepath.Join(dir, "bin")}
	r.State, r.Program = filepath.Join("/run", filepath.Base(dir)), filepath.Join(r.Clients, driverProgram)
	r.HostDir, r.Isolation = r.hostDir(), IsolationFlags()
	if err := r.takeUIDs(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err := r.install(bin); err != nil {
		return nil, errors.Join(err, r.uids.Close(), os.RemoveAll(dir))
	}
	return r, nil
}

func (r *Rig) hostDir() string { return filepath.Join("/opt", filepath.Base(r.Dir)) }

// launcher is what the environment says.
func launcher() (string, error) {
	switch l := os.Getenv(EnvLauncher); l {
	case "", LauncherProcess:
		return LauncherProcess, nil
	case LauncherSystemd:
		return l, nil
	default:
		return "", fmt.Errorf("%s is %q, neither %q nor %q", EnvLauncher, l, LauncherProcess, LauncherSystemd)
	}
}

// takeUIDs takes the first block of user ids that no other rig in this network namespace has. The sign is an abstract UNIX
// socket, which vanishes with its process.
func (r *Rig) takeUIDs() error {
	first := hostUID
	if isolate.Inside() {
		first = firstUID
	}
	for block := range uidBlocks {
		sign, err := new(net.ListenConfig).Listen(context.Background(), "unix", fmt.Sprintf("@s3csi-rig-uids-%d", block))
		if err != nil {
			continue
		}
		r.uids, r.FirstUID, r.LastUID = sign, first+block*uidBlock, first+(block+1)*uidBlock-1
		return nil
	}
	return fmt.Errorf("no block of user ids is free: do %d rigs run on this machine?", uidBlocks)
}

func (r *Rig) install(bin string) error {
	if err := os.Chmod(r.Dir, 0o755); err != nil {
		return err
	}
	for _, d := range []string{r.Clients, r.Cache, filepath.Join(r.Dir, "targets")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := r.makeRaces(); err != nil {
		return err
	}
	programs := map[string]string{}
	for _, name := range []string{driverProgram, helperProgram, "s3-csi-fusermount", "s3-csi-fuse-starter", "s3-csi-rclone"} {
		programs[name] = filepath.Join(bin, name)
	}
	if mountpoint, err := Mountpoint(bin); err == nil {
		programs[Programs()["mountpoint-s3"]] = mountpoint
	}
	for name, from := range programs {
		if err := CopyProgram(from, filepath.Join(r.Clients, name)); err != nil {
			return fmt.Errorf("installing programs (make builds them): %w", err)
		}
	}
	return nil
}

// InstallDriver copies the driver and helper of another version, which are in the directory bin, and gives the driver's path
// for Program. The clients stay those of the rig.
func (r *Rig) InstallDriver(bin string) (program string, err error) {
	dir, err := os.MkdirTemp(r.Dir, "driver-")
	if err != nil {
		return "", err
	}
	program = filepath.Join(dir, driverProgram)
	err = errors.Join(os.Chmod(dir, 0o755), CopyProgram(filepath.Join(bin, driverProgram), program),
		CopyProgram(filepath.Join(bin, helperProgram), filepath.Join(dir, helperProgram)))
	return program, err
}

// Programs is where the running driver has helpers and clients from: Clients, or what it has installed on the host.
func (r *Rig) Programs() (string, error) {
	if r.Launcher != LauncherSystemd {
		return r.Clients, nil
	}
	versions, err := filepath.Glob(filepath.Join(r.HostDir, "*", "*", helperProgram))
	if err != nil || len(versions) != 1 {
		return "", fmt.Errorf("the driver must have installed its programs below %s once: %q %w", r.HostDir, versions, err)
	}
	return filepath.Dir(versions[0]), nil
}

// CopyProgram gives a program another name, which takes nothing, or makes a copy that other users may execute.
func CopyProgram(from, to string) error {
	from, err := filepath.EvalSymlinks(from)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if unix.Stat(from, &st) == nil && st.Uid == 0 && st.Mode&0o777 == 0o755 && os.Link(from, to) == nil {
		return nil
	}
	program, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return WriteProgram(to, program)
}

// WriteProgram makes a program that can be executed at once. A child that another goroutine forks while the file is open has
// it open for writing too, until it executes its own program, and what anybody has open for writing cannot be executed.
func WriteProgram(path string, program []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // the file may have another name
		return err
	}
	return errors.Join(os.WriteFile(path, program, 0o755), os.Chmod(path, 0o755))
}

// Target is a target path of that name, whose parent exists, as a CO makes it.
func (r *Rig) Target(name string) string {
	parent := filepath.Join(r.Dir, "targets", name)
	_ = os.MkdirAll(parent, 0o755) // a failure shows when the target is used
	return filepath.Join(parent, "mount")
}

// Logs are all that the rig's drivers wrote.
func (r *Rig) Logs() string {
	b, _ := os.ReadFile(r.logFile())
	return string(b)
}

func (r *Rig) logFile() string { return filepath.Join(r.Dir, "driver.log") }

// Processes describes what runs for mounts: "s3-csi-rclone, pid 12, uid 2100007". What is exiting is not among it: a spare whose
// directory is gone may be.
func (r *Rig) Processes() []string {
	var all []string
	for _, p := range r.Running("") {
		if !p.zombie {
			all = append(all, p.String())
		}
	}
	return all
}

// Running are the mounts' processes of a name; "" is any.
func (r *Rig) Running(name string) []Process {
	return slices.DeleteFunc(r.processes(), func(p Process) bool { return name != "" && p.Name != name })
}

// Leftovers are the Traces that stay when what is just going has gone. A node without publications has none.
func (r *Rig) Leftovers() []string {
	// What was killed is gone when the last of its threads is.
	for range 200 {
		if !slices.ContainsFunc(r.processes(), func(p Process) bool { return p.zombie }) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	return append(r.unitsLeft(), r.Traces()...) // the units first: what they hold goes with them
}

// Traces lists what there is of mounts in the mount table, among processes, in the state and cache directories. UnitTraces are the rest.
func (r *Rig) Traces() []string {
	var all []string
	for _, m := range r.mounts() {
		if strings.HasPrefix(m.Source, "s3csi:") || strings.HasPrefix(m.Source, "s3csi-pod:") || m.Source == "s3csi-scratch" && !isSpare(m.Mountpoint) {
			all = append(all, "mount "+m.Mountpoint+" of "+m.Source)
		}
	}
	for _, p := range r.processes() {
		all = append(all, "process "+p.String())
	}
	for _, dir := range []string{filepath.Join(r.State, "mounts"), filepath.Join(r.State, "sources"), filepath.Join(r.State, "publications"),
		filepath.Join(r.State, "podclients"), filepath.Join(r.State, "podclients", "mounts"), filepath.Join(r.State, "scratch"), r.Cache} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if e.Name() != "salt" && e.Name() != "lock" && e.Name() != "mounts" && !isSpare(e.Name()) { // the node's, not a mount's
				all = append(all, "file "+filepath.Join(dir, e.Name()))
			}
		}
	}
	return all
}

// mounts are those below the rig's directories, the uppermost first.
func (r *Rig) mounts() []*mountinfo.Info {
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(m.Mountpoint, r.Dir+"/") && !strings.HasPrefix(m.Mountpoint, r.State+"/"), false
	})
	if err != nil {
		return nil
	}
	slices.Reverse(all)
	return all
}

// Process is a process of a mount.
type Process struct {
	Name     string
	PID, UID int
	zombie   bool
}

func (p Process) String() string {
	text := fmt.Sprintf("%s, pid %d, uid %d", p.Name, p.PID, p.UID)
	if p.zombie {
		text += ", a zombie"
	}
	return text
}

// processes are those that run as a uid of the rig's range, but those of spares. One that has exited and was not reaped yet is
// not among them: after a crash of the driver that is for the machine's init to do.
func (r *Rig) processes() []Process {
	// Before and after the processes: a spare that a mount has taken meanwhile is still one, and one that was started meanwhile is, too.
	before, all, after := r.Spares(), r.AllProcesses(), r.Spares()
	spares := map[int]bool{}
	for _, found := range []map[string]int{before, after} {
		for _, uid := range found {
			spares[uid] = true
		}
	}
	return slices.DeleteFunc(all, func(p Process) bool { return spares[p.UID] })
}

// AllProcesses are those of mounts and of spares.
func (r *Rig) AllProcesses() []Process {
	pids, _ := proc.PIDs()
	var found []Process
	for _, pid := range pids {
		status := statusOf(pid)
		if uid, _ := strconv.Atoi(statusField(status, "Uid")); uid >= r.FirstUID && uid <= r.LastUID && !ended(status) {
			found = append(found, Process{ProgramOf(fmt.Sprintf("/proc/%d", pid)), pid, uid, statusField(status, "State") == "Z"})
		}
	}
	return found
}

// starting are the processes that run the rig's own copies of programs. A helper that a driver was starting when it was killed is among
// them before it has its uid, which the next rig may have, too.
func (r *Rig) starting() []int {
	pids, _ := proc.PIDs()
	return slices.DeleteFunc(pids, func(pid int) bool {
		exe, err := os.Readlink(proc.Path(pid, "exe"))
		return err != nil || !strings.HasPrefix(exe, r.Dir+"/") // err: it has exited
	})
}

// ProgramOf is the name of a process's program, of which the kernel itself keeps 15 characters, by its directory in /proc.
func ProgramOf(process string) string {
	comm, _ := os.ReadFile(filepath.Join(process, "comm"))
	name := strings.TrimSpace(string(comm))
	exe, _ := os.Readlink(filepath.Join(process, "exe"))
	if whole := strings.TrimSuffix(filepath.Base(exe), " (deleted)"); len(name) == 15 && strings.HasPrefix(whole, name) {
		return whole
	}
	return name
}

// Close ends everything by force and removes the directories. Data races that were reported are an error.
func (r *Rig) Close() error {
	r.mu.Lock()
	drivers := r.drivers
	r.mu.Unlock()
	for _, d := range drivers {
		d.Kill()
	}
	var errs []error
	for range 100 {
		left := r.starting()
		for _, p := range r.AllProcesses() {
			left = append(left, p.PID)
		}
		if len(left) == 0 {
			break
		}
		for _, pid := range left {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		time.Sleep(20 * time.Millisecond)
	}
	errs = append(errs, r.endUnits(), r.Races())
	for _, m := range r.mounts() {
		if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("unmounting %s: %w", m.Mountpoint, err))
		}
	}
	if len(r.mounts()) == 0 { // never delete through a mount
		errs = append(errs, os.RemoveAll(r.State), os.RemoveAll(r.hostDir()), os.RemoveAll(r.Dir))
	}
	if err := r.uids.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// run starts a program whose output goes to the rig's log, and waits for it: ended is closed then. It does not outlive the tests,
// whatever ends them: a driver without its test would clear away what the next one that gets its user ids has.
func (r *Rig) run(ctx context.Context, ended chan<- struct{}, env []string, path string, args ...string) (*exec.Cmd, error) {
	log, err := os.OpenFile(r.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), path, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		// The signal comes when the thread ends that started the program, so it is kept.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		log.Close()
		started <- err
		if err == nil {
			_ = cmd.Wait()
			close(ended)
		}
	}()
	return cmd, <-started
}
