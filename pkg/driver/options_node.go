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

// The launchers that an operator can choose.
const (
	LauncherSystemd = "systemd" // transient units of the host's systemd
	LauncherProcess = "process" // plain children
	LauncherAuto    = "auto"    // systemd where the host has it
)

// Where the resolv.conf comes from by which helpers resolve names.
const (
	DNSHost = "host" // the host's
	DNSPod  = "pod"  // the driver's own container's
)

// NodeOptions are those of the modes that serve the CSI Node service.
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
	VolumeAttachLimit int64
	InlineVolumes     bool // of pods
	MountTimeout      time.Duration
	DrainTimeout      time.Duration
	HangTimeout       time.Duration // 0: never
	Heal              bool
	MemoryLimit       Memory // of one mount
	CPUWeight         uint64 // of one mount; 0: the host's default
	TasksMax          uint64 // of one mount; 0: the host's default
	SliceMemoryLimit  Memory // of all mounts together
}

// AddFlags registers the options on fs with their defaults.
func (o *NodeOptions) AddFlags(fs *pflag.FlagSet) {
	o.UIDs = UIDRange{First: 2000000, Last: 2065535}
	o.MemoryLimit, o.SliceMemoryLimit = Memory{Bytes: 1 << 30}, Memory{Percent: 50}
	fs.StringVar(&o.NodeID, "node-id", "", "this node's name to the CO, at most 256 bytes; none: the host name")
	fs.StringVar(&o.StateDir, "state-dir", "/run/s3-csi", "directory on the host, on a tmpfs, for mounts, sockets and records")
	fs.StringVar(&o.CacheDir, "cache-dir", "/var/cache/s3-csi", "directory on the host, on a disk, for what clients may not keep in memory")
	fs.StringVar(&o.ClientDir, "client-dir", "", "directory of the client programs; none: the driver's own")
	fs.StringVar(&o.DefaultClient, "default-client", "mountpoint-s3", "the client of volumes that name none")
	fs.StringVar(&o.Launcher, "launcher", LauncherAuto, "how helpers come to life: systemd (transient units of the host's), process (plain children), or auto (systemd where the host has it; decided once, at the start)")
	fs.StringVar(&o.DNS, "node-dns", DNSHost, "whose resolv.conf decides how mounts resolve names: host (the host's), or pod (the one of the driver's own container, which in Kubernetes knows the cluster's services; for mounts that start from then on)")
	fs.StringVar(&o.HostDir, "host-dir", "/opt/s3-csi", "directory on the host where the programs of helpers and clients are installed, each version in one of its own; not used by the launcher process of a driver that is no container")
	fs.Var(&o.UIDs, "uid-range", "user ids of the host, \"first-last\", that nobody else uses: every mount's client runs under one of its own")
	fs.StringVar(&o.TargetRoot, "target-root", "", "directory below which every target path must be, for example /var/lib/kubelet; none: any")
	fs.BoolVar(&o.AllowIsolated, "allow-isolated", false, "publish volumes even if the driver is in a container that cannot see the host (no hostPID: true, --pid=host or pid_mode = \"host\"); all mounts then end with the container, and files that are not stored yet are lost")
	fs.Int64Var(&o.VolumeAttachLimit, "volume-attach-limit", 0, "how many volumes the CO may put on this node; 0: it decides")
	fs.BoolVar(&o.InlineVolumes, "inline-volumes", false, "publish volumes that pods define themselves (csi in a pod's volumes), never with the driver's own credentials; the CSIDriver object then needs the mode Ephemeral, and podInfoOnMount: true")
	fs.DurationVar(&o.MountTimeout, "mount-timeout", 90*time.Second, "how long a client may take to serve a new mount")
	fs.DurationVar(&o.DrainTimeout, "drain-timeout", 100*time.Second, "how long a NodeUnpublishVolume whose caller set no deadline waits for a client's uploads; they go on after it, and the retry waits for them again")
	fs.BoolVar(&o.Heal, "heal", true, "start a client that died again, and put the living mount in the place of the dead one, also in containers that run")
	fs.DurationVar(&o.HangTimeout, "hang-timeout", 2*time.Minute, "after how long without an answer and without progress a mount is given up: its connection is aborted and, with --heal, started anew; 0: never")
	fs.Var(&o.MemoryLimit, "memory-limit", "memory of one mount, helper and client together, where the volume does not say: bytes as 1Gi, a share of the node's as 5%, or 0 for no limit; enforced by the launcher systemd")
	fs.Uint64Var(&o.CPUWeight, "cpu-weight", 0, "share of the CPU of one mount when it is scarce, where the volume does not say: 1 to 10000, 100 is every service's; 0: systemd's default; enforced by the launcher systemd")
	fs.Uint64Var(&o.TasksMax, "tasks-max", 1024, "processes and threads of one mount, where the volume does not say; 0: systemd's default; enforced by the launcher systemd")
	fs.Var(&o.SliceMemoryLimit, "slice-memory-limit", "memory of all mounts of the node together: bytes as 8Gi, a share of the node's as 50%, or 0 for what the host's administrator has set; enforced by the launcher systemd")
}

func (o *NodeOptions) validate(c *checker) {
	c.check("node-id", checkNodeID(o.NodeID))
	c.check("state-dir", checkAbsolute(o.StateDir))
	c.check("cache-dir", checkAbsolute(o.CacheDir))
	c.check("client-dir", optional(checkAbsolute, o.ClientDir))
	c.check("host-dir", checkAbsolute(o.HostDir))
	_, err := client.Get(o.DefaultClient)
	c.check("default-client", err)
	c.check("launcher", checkOneOf(o.Launcher, []string{LauncherSystemd, LauncherProcess, LauncherAuto}))
	c.check("node-dns", checkOneOf(o.DNS, []string{DNSHost, DNSPod}))
	c.check("target-root", optional(checkAbsolute, o.TargetRoot))
	if o.VolumeAttachLimit < 0 {
		c.check("volume-attach-limit", fmt.Errorf("%d is negative; 0 leaves the limit to the CO", o.VolumeAttachLimit))
	}
	c.check("mount-timeout", checkDuration(o.MountTimeout, time.Second, time.Hour))
	c.check("drain-timeout", checkDuration(o.DrainTimeout, time.Second, time.Hour))
	if o.HangTimeout != 0 {
		c.check("hang-timeout", checkDuration(o.HangTimeout, time.Second, 24*time.Hour))
	}
	if o.CPUWeight > volume.MaxCPUWeight {
		c.check("cpu-weight", fmt.Errorf("%d is not between 1 and %d", o.CPUWeight, volume.MaxCPUWeight))
	}
	if o.TasksMax != 0 && (o.TasksMax < volume.MinTasksMax || o.TasksMax > volume.MaxTasksMax) {
		c.check("tasks-max", fmt.Errorf("%d is not between %d and %d", o.TasksMax, volume.MinTasksMax, volume.MaxTasksMax))
	}
}

// ChosenLimits are the flags of limits that are not as they are by default.
func (o *NodeOptions) ChosenLimits() []string {
	var byDefault NodeOptions
	byDefault.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	var chosen []string
	for _, l := range []struct {
		flag   string
		chosen bool
	}{
		{"--memory-limit", o.MemoryLimit != byDefault.MemoryLimit},
		{"--cpu-weight", o.CPUWeight != byDefault.CPUWeight},
		{"--tasks-max", o.TasksMax != byDefault.TasksMax},
		{"--slice-memory-limit", o.SliceMemoryLimit != byDefault.SliceMemoryLimit},
	} {
		if l.chosen {
			chosen = append(chosen, l.flag)
		}
	}
	return chosen
}

// Memory is an amount of memory, in bytes or as a share of a node's. It is a pflag.Value; the zero value is no limit.
type Memory struct {
	Bytes   uint64
	Percent uint64 // 1 to 100; 0: Bytes counts
}

// String is the form that Set reads.
func (m *Memory) String() string {
	switch {
	case m.Percent != 0:
		return strconv.FormatUint(m.Percent, 10) + "%"
	case m.Bytes != 0:
		return volume.FormatQuantity(m.Bytes)
	}
	return "0"
}

// Type names the value in help texts.
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
			return errors.New("a share is 1% to 100%")
		}
		*m = Memory{Percent: n}
		return nil
	}
	bytes, err := volume.ParseQuantity(s)
	if err != nil {
		return fmt.Errorf("%w, nor a share of the node's memory, as 50%%, nor 0 for no limit", err)
	}
	if bytes < volume.MinMemoryLimit {
		return fmt.Errorf("is less than %s, which no client can live with", volume.FormatQuantity(volume.MinMemoryLimit))
	}
	*m = Memory{Bytes: bytes}
	return nil
}

// Of is the amount in bytes on a node with so much memory; 0 is no limit.
func (m *Memory) Of(total uint64) uint64 {
	if m.Percent == 0 {
		return m.Bytes
	}
	return max(total/100*m.Percent, volume.MinMemoryLimit)
}
