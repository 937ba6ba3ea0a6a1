package client

import (
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// A pod's author gets as much of a node as volumes that say nothing, and no more.
func TestWhatAnInlineVolumeMayHave(t *testing.T) {
	share := Share{Memory: 1 << 30, CPUWeight: 100, Tasks: 1024}
	for _, tt := range []struct {
		client string
		a      volume.Attributes
		list   []string
		share  Share
		denied string // "": it passes
	}{
		{"mountpoint-s3", volume.Attributes{}, nil, share, ""},
		{"rclone", volume.Attributes{}, nil, share, ""},
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 1 << 30, CPUWeight: 100, TasksMax: 1024, Cache: true, CacheSize: 1 << 30},
			[]string{"allow-delete=false", "metadata-ttl=5"}, share, ""},
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 1<<30 + 1}, nil, share, "volume_context.memoryLimit: "},
		{"rclone", volume.Attributes{MemoryLimit: 2 << 30}, nil, share, "volume_context.memoryLimit: 2Gi"},
		{"rclone", volume.Attributes{Usage: volume.UsageOff}, nil, share, "volume_context.usage: "},
		{"rclone", volume.Attributes{CPUWeight: 101}, nil, share, "volume_context.cpuWeight: 101"},
		{"rclone", volume.Attributes{TasksMax: 1025}, nil, share, "volume_context.tasksMax: 1025"},
		{"rclone", volume.Attributes{Cache: true, CacheSize: 2 << 30}, nil, share, "volume_context.cacheSize: 2Gi"},
		{"mountpoint-s3", volume.Attributes{}, []string{"max-cache-size=1024"}, share, ""},
		{"mountpoint-s3", volume.Attributes{}, []string{"max-cache-size=1025"}, share, "mountOptions: a cache of 1025Mi"},
		{"rclone", volume.Attributes{}, []string{"cache-size=1Gi", "read-cache"}, share, ""},
		{"rclone", volume.Attributes{}, []string{"read-cache", "cache-size=1025Mi"}, share, "mountOptions: a cache of 1025Mi"},
		{"mountpoint-s3", volume.Attributes{}, []string{"memory-target=819"}, share, ""},
		{"mountpoint-s3", volume.Attributes{}, []string{"memory-target=100000"}, share, "mountOptions: the required memoryLimit of"},
		{"mountpoint-s3", volume.Attributes{}, []string{"part-size=419430400"}, share, "mountOptions: the required memoryLimit of"},
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 1 << 40}, []string{"memory-target=100000"}, Share{CPUWeight: 100, Tasks: 1024}, ""}, // no limit
		// A node limit below the client's minimum is raised for all volumes, inline volumes included.
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 640 << 20}, nil, Share{Memory: 64 << 20}, ""},
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 641 << 20}, nil, Share{Memory: 64 << 20}, "volume_context.memoryLimit: 641Mi"},
		{"mountpoint-s3", volume.Attributes{}, []string{"debug"}, share, `mountOptions: option "debug"`},
		{"mountpoint-s3", volume.Attributes{}, []string{"log-metrics=true"}, share, `mountOptions: option "log-metrics"`},
		{"mountpoint-s3", volume.Attributes{}, []string{"debug=false"}, share, ""},
		{"rclone", volume.Attributes{}, []string{"debug"}, share, `mountOptions: option "debug"`},
	} {
		c, list := get(t, tt.client), options(tt.list...)
		must(t, c.Check(list, "m"))
		must(t, c.CheckLimits(tt.a, list, "p"))
		err := c.CheckInline(tt.a, list, tt.share)
		switch {
		case tt.denied == "" && err != nil:
			t.Errorf("%s, %+v, %q: %v", tt.client, tt.a, tt.list, err)
		case tt.denied != "" && (!fault.Is(err, fault.Denied) || !strings.HasPrefix(err.Error(), tt.denied)):
			t.Errorf("%s, %+v, %q: %v, want a Denied error that begins with %q", tt.client, tt.a, tt.list, err, tt.denied)
		}
	}
}

// An option that says how much a client keeps on disk, or that fills the log, is one of the client's: a new name is noticed here.
func TestTheOptionsThatInlineVolumesAreCheckedForAreThere(t *testing.T) {
	for _, c := range All() {
		bounded := 0
		for _, name := range c.caching {
			if o, ok := c.Options[name]; !ok {
				t.Errorf("%s has no option %s", c.Name, name)
			} else if o.Kind != Flag {
				if bounded++; o.bytes("7Mi") == 0 && o.bytes("7") == 0 {
					t.Errorf("%s: unknown number of bytes in %s", c.Name, name)
				}
			}
		}
		if bounded == 0 {
			t.Errorf("%s: no option bounds the cache", c.Name)
		}
		for name, o := range c.Options {
			if strings.HasPrefix(o.Meaning, "Log ") != slices.Contains(c.logging, name) {
				t.Errorf("%s: does %s write to the log? %q", c.Name, name, o.Meaning)
			}
		}
	}
}
