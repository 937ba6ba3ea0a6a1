package driver

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Values of --launcher.
const (
	LauncherSystemd = "systemd" // transient units of the host's systemd
	LauncherProcess = "process" // child processes of the driver
	LauncherAuto    = "auto"    // systemd if the host runs it, otherwise process
)

// Values of --node-dns: the resolv.conf that helpers use.
const (
	DNSHost = "host" // the host's
	DNSPod  = "pod"  // the driver's own container's
)

// maxDrainTimeout is the maximum of --drain-timeout.
const maxDrainTimeout = 30 * 24 * time.Hour

// NodeOptions are the options of the modes that serve the CSI Node service.
type NodeOptions struct {
	NodeID            string
	StateDir          string
	CacheDir          string
	ClientDir         string // "": the directory of the driver's executable
	DefaultClient     string
	Launcher          string
	DNS               string
	HostDir           string
	UIDs              UIDRange
	TargetRoot        string // "": any
	AllowIsolated     bool   // publish volumes even if the driver cannot see the host
	VolumeAttachLimit VolumeLimit
	InlineVolumes     bool // of pods
	PodClients        bool // inline volumes whose client runs in the pod
	MountTimeout      time.Duration
	DrainTimeout      time.Duration
	HangTimeout       time.Duration // 0: never
	Heal              bool
	MemoryLimit       Memory // of one mount
	CPUWeight         uint64 // of one mount; 0: the host's default
	TasksMax          uint64 // of one mount; 0: the host's default
	SliceMemoryLimit  Memory // of all mounts together
	LingerMaxMounts   int
	LingerMaxMemory   Memory // of all lingering mounts together
	UsageMaxRequests  int    // of one listing
	VolumeMetrics     bool
}

func (o *NodeOptions) addFlags(fs *pflag.FlagSet) {
	o.UIDs = UIDRange{First: 2000000, Last: 2065535}
	o.MemoryLimit, o.SliceMemoryLimit = Memory{Bytes: 1 << 30}, Memory{Percent: 50}
	o.LingerMaxMemory = Memory{Percent: 10}
	fs.StringVar(&o.NodeID, "node-id", "", "node id that is reported to the CO, at most 256 bytes; default: the host name")
	fs.StringVar(&o.StateDir, "state-dir", "/run/s3-csi", "directory on the host for mounts, sockets and records, on a tmpfs")
	fs.StringVar(&o.CacheDir, "cache-dir", "/var/cache/s3-csi", "directory on the host for the caches of clients, on a disk")
	fs.StringVar(&o.ClientDir, "client-dir", "", "directory of the client programs; default: the directory of the driver's executable")
	fs.StringVar(&o.DefaultClient, "default-client", "mountpoint-s3", "client of volumes that do not name one")
	fs.StringVar(&o.Launcher, "launcher", LauncherAuto, "how helpers are started: systemd (transient units of the host's systemd), process (child processes), "+
		"or auto (systemd if the host runs it)")
	fs.StringVar(&o.DNS, "node-dns", DNSHost, "which resolv.conf new mounts use: host (the host's), or pod (that of the driver's container, which in "+
		"Kubernetes resolves the cluster's services)")
	fs.StringVar(&o.HostDir, "host-dir", "/opt/s3-csi", "directory on the host for the programs of helpers and clients; not used by launcher process if the "+
		"driver does not run in a container")
	fs.Var(&o.UIDs, "uid-range", "range of unused user ids on the host, \"first-last\"; every mount gets its own")
	fs.StringVar(&o.TargetRoot, "target-root", "", "directory that must contain every target path, for example /var/lib/kubelet; if empty, any directory but "+
		"those of the system is allowed. It may be, or lie below, a symbolic link")
	fs.BoolVar(&o.AllowIsolated, "allow-isolated", false, "publish volumes even if the driver runs in a container that cannot see the host; all mounts then "+
		"end with the container, and files that are not uploaded yet are lost")
	fs.Var(&o.VolumeAttachLimit, "volume-attach-limit", "maximum number of volumes on this node, reported to the CO; auto: --slice-memory-limit divided by "+
		"--memory-limit, where the launcher enforces both; 0: no limit")
	fs.BoolVar(&o.InlineVolumes, "inline-volumes", false, "allow inline volumes (csi in a pod's volumes), never with the driver's own credentials; requires "+
		"mode Ephemeral and podInfoOnMount: true in the CSIDriver object")
	fs.BoolVar(&o.PodClients, "pod-clients", false, "allow inline volumes whose FUSE client runs in the user's own pod, which gets the descriptor of the mount "+
		"from the driver (attributes fdPassingEmptyDirName and fdPassingSocketName); requires --heal, and mode Ephemeral and podInfoOnMount: true in the "+
		"CSIDriver object")
	fs.DurationVar(&o.MountTimeout, "mount-timeout", 90*time.Second, "how long a client may take until its mount is ready")
	fs.DurationVar(&o.DrainTimeout, "drain-timeout", 24*time.Hour,
		"how long NodeUnpublishVolume waits for the uploads of a client if the caller set no deadline (Nomad); uploads continue after it")
	fs.BoolVar(&o.Heal, "heal", true, "restart crashed clients and replace their stale mounts, also in running containers")
	fs.DurationVar(&o.HangTimeout, "hang-timeout", 2*time.Minute,
		"how long a client may be unresponsive and without progress before its FUSE connection is aborted and, with --heal, the client is restarted; 0: never")
	fs.Var(&o.MemoryLimit, "memory-limit", "default memory limit of one mount, helper and client together: bytes (1Gi), a share of the node's memory (5%), or "+
		"0 for no limit; only launcher systemd enforces it")
	fs.Uint64Var(&o.CPUWeight, "cpu-weight", 0, "default CPU weight of one mount, 1 to 10000 (other services have 100); 0: systemd's default; only launcher "+
		"systemd enforces it")
	fs.Uint64Var(&o.TasksMax, "tasks-max", 1024, "default maximum number of processes and threads of one mount; 0: systemd's default; only launcher systemd "+
		"enforces it")
	fs.Var(&o.SliceMemoryLimit, "slice-memory-limit", "memory limit of all mounts of the node together: bytes (8Gi), a share of the node's memory (50%), or 0 "+
		"for the limit that the host's administrator has set; only launcher systemd enforces it")
	fs.IntVar(&o.LingerMaxMounts, "linger-max-mounts", 16, "how many mounts without a publication may linger, of volumes with the parameter linger; the least "+
		"recently used ends first; 0: none")
	fs.Var(&o.LingerMaxMemory, "linger-max-memory", "resident memory that the clients and helpers of all lingering mounts may have together: bytes (1Gi), a "+
		"share of the node's memory (10%), or 0 for no lingering mounts; the least recently used ends first")
	fs.IntVar(&o.UsageMaxRequests, "usage-max-requests", 1000, "how many pages of up to 1000 objects one measurement of usage may list; 0: this node measures "+
		"nothing")
	fs.BoolVar(&o.VolumeMetrics, "volume-metrics", false, "serve the metrics that have the label mount, about 100 time series for each mount")
}

func (o *NodeOptions) validate(c *checker) {
	c.check("node-id", checkNodeID(o.NodeID))
	c.check("state-dir", checkAbsolute(o.StateDir))
	c.check("cache-dir", checkAbsolute(o.CacheDir))
	c.check("client-dir", optional(checkAbsolute, o.ClientDir))
	c.check("host-dir", checkAbsolute(o.HostDir))
	c.check("default-client", client.CheckName(o.DefaultClient))
	c.check("launcher", checkOneOf(o.Launcher, []string{LauncherSystemd, LauncherProcess, LauncherAuto}))
	c.check("node-dns", checkOneOf(o.DNS, []string{DNSHost, DNSPod}))
	c.check("target-root", optional(checkAbsolute, o.TargetRoot))
	c.check("mount-timeout", checkRange(o.MountTimeout, time.Second, time.Hour))
	c.check("drain-timeout", checkRange(o.DrainTimeout, time.Second, maxDrainTimeout))
	if o.HangTimeout != 0 {
		c.check("hang-timeout", checkRange(o.HangTimeout, time.Second, 24*time.Hour))
	}
	c.check("pod-clients", wrongIf(o.PodClients && !o.Heal, "it needs --heal, with which the driver shows a client's file system in running containers"))
	c.check("linger-max-mounts", wrongIf(o.LingerMaxMounts < 0, "%d is negative; 0 means that no mount lingers", o.LingerMaxMounts))
	c.check("usage-max-requests", wrongIf(o.UsageMaxRequests < 0, "%d is negative; 0 means that nothing is measured", o.UsageMaxRequests))
	c.check("cpu-weight", wrongIf(o.CPUWeight > volume.MaxCPUWeight, "%d is not between 1 and %d", o.CPUWeight, volume.MaxCPUWeight))
	c.check("tasks-max", wrongIf(o.TasksMax != 0 && (o.TasksMax < volume.MinTasksMax || o.TasksMax > volume.MaxTasksMax), "%d is not between %d and %d",
		o.TasksMax, volume.MinTasksMax, volume.MaxTasksMax))
}

// ChosenLimits returns the flags of limits that differ from the defaults and need a launcher that enforces limits.
func (o *NodeOptions) ChosenLimits() []string {
	var byDefault NodeOptions
	byDefault.addFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	var chosen []string
	for _, l := range []struct {
		flag   string
		chosen bool
	}{
		{"--memory-limit", o.MemoryLimit != byDefault.MemoryLimit},
		{"--cpu-weight", o.CPUWeight != byDefault.CPUWeight},
		{"--tasks-max", o.TasksMax != byDefault.TasksMax},
		{"--slice-memory-limit", o.SliceMemoryLimit != byDefault.SliceMemoryLimit},
		{"--volume-attach-limit=auto", o.VolumeAttachLimit == AutoVolumeLimit},
	} {
		if l.chosen {
			chosen = append(chosen, l.flag)
		}
	}
	return chosen
}

// VolumeLimit is a number of volumes; 0: no limit; AutoVolumeLimit: as many as the memory of all mounts has room for.
type VolumeLimit int64

// AutoVolumeLimit is the VolumeLimit "auto".
const AutoVolumeLimit VolumeLimit = -1

// String returns the form that Set reads.
func (l *VolumeLimit) String() string {
	if *l == AutoVolumeLimit {
		return "auto"
	}
	return strconv.FormatInt(int64(*l), 10)
}

// Type returns the name of the value in help texts.
func (l *VolumeLimit) Type() string { return "limit" }

// Set reads a number, or "auto".
func (l *VolumeLimit) Set(s string) error {
	if s == "auto" {
		*l = AutoVolumeLimit
		return nil
	}
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return errors.New("must be auto, a number of volumes, or 0 for no limit")
	}
	*l = VolumeLimit(n)
	return nil
}

// Of returns the number on a node that enforces these memory limits, in bytes, of one mount and of all mounts together; 0: none.
func (l *VolumeLimit) Of(one, all uint64) int64 {
	switch {
	case *l != AutoVolumeLimit:
		return int64(*l)
	case one == 0 || all == 0:
		return 0
	}
	return int64(max(all/one, 1))
}

// Memory is an amount of memory, in bytes or as a share of the node's memory. It is a pflag.Value. The zero value is no limit.
type Memory struct {
	Bytes   uint64
	Percent uint64 // 1 to 100; 0: Bytes is used
}

// String returns the form that Set reads.
func (m *Memory) String() string {
	switch {
	case m.Percent != 0:
		return strconv.FormatUint(m.Percent, 10) + "%"
	case m.Bytes != 0:
		return volume.FormatQuantity(m.Bytes)
	}
	return "0"
}

// Type returns the name of the value in help texts.
func (m *Memory) Type() string { return "memory" }

// Set reads an amount of bytes ("1Gi"), a share ("50%") or "0".
func (m *Memory) Set(s string) error {
	if s == "0" {
		*m = Memory{}
		return nil
	}
	if number, ok := strings.CutSuffix(s, "%"); ok {
		n, err := strconv.ParseUint(number, 10, 8)
		if err != nil || n < 1 || n > 100 {
			return errors.New("a share must be 1% to 100%")
		}
		*m = Memory{Percent: n}
		return nil
	}
	bytes, err := volume.ParseQuantity(s)
	if err != nil {
		return fmt.Errorf("%w, nor a share of the node's memory such as 50%%, nor 0 for no limit", err)
	}
	if bytes < volume.MinMemoryLimit {
		return fmt.Errorf("is less than %s, the minimum for a client", volume.FormatQuantity(volume.MinMemoryLimit))
	}
	*m = Memory{Bytes: bytes}
	return nil
}

// Of returns the amount in bytes on a node with the given memory; 0 is no limit.
func (m *Memory) Of(total uint64) uint64 {
	if m.Percent == 0 {
		return m.Bytes
	}
	return max(total/100*m.Percent, volume.MinMemoryLimit)
}
