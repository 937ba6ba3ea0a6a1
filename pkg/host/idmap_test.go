//go:build linux

package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// idMap mounts a target on a path of a process's namespace (0: the namespace itself), id-mapped with the user namespace of another process, as
// container runtimes do it.
func (r *swapRig) idMap(target string, pid, users int, at string, more uint64) {
	r.t.Helper()
	clone := -1
	r.run(func() (err error) {
		clone, err = unix.OpenTree(unix.AT_FDCWD, target, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		return err
	})
	defer unix.Close(clone)
	ns, err := unix.Open(proc.Path(users, "ns", "user"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	defer unix.Close(ns)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP | more, Userns_fd: uint64(ns)}
	if err := unix.MountSetattr(clone, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		r.t.Skipf("needs a kernel that id-maps FUSE file systems: %v", err)
	}
	into := namespaceRef{n: r.n}
	if pid != 0 {
		id, err := r.n.looks.mountNamespace(r.t.Context(), pid)
		if err != nil {
			r.t.Fatal(err)
		}
		into = r.n.refTo(&otherNamespace{id: id, pids: []int{pid}})
	}
	err = into.do(within(r.t, 10*time.Second), "mounting", func(nsHandle) error {
		return unix.MoveMount(clone, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH)
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

// ownerOf returns the owner of a path that a process sees.
func (r *swapRig) ownerOf(pid int, path string) (uid, gid uint32) {
	r.t.Helper()
	var st unix.Stat_t
	r.run(func() error { return unix.Stat(proc.Path(pid, "root")+path, &st) })
	return st.Uid, st.Gid
}

func TestReplacementOfAnIDMappedMountHasTheSameMapping(t *testing.T) {
	r := newSwapRig(t)
	r.mapped = true
	r.restart()
	target := r.bind("target", "/", BindAttrs{})
	whole, sub, others, readOnly := mkdir(t, r.dir, "whole"), mkdir(t, r.dir, "sub"), mkdir(t, r.dir, "others"), mkdir(t, r.dir, "read-only")
	const private = "mount --make-rprivate / &&"
	pod, other := r.userContainer(300_000, private), r.userContainer(500_000, private)
	r.idMap(target, pod, pod, whole, 0)
	r.idMap(target+"/sub", pod, pod, sub, unix.MOUNT_ATTR_NOEXEC)
	r.idMap(target, pod, other, others, 0)
	r.idMap(target, pod, pod, readOnly, unix.MOUNT_ATTR_RDONLY)
	before := newTree(r.tableOf(pod)).topAt(sub)
	r.restart()
	for _, s := range r.elsewhere() {
		left := s.Mountpoint == others || s.Mountpoint == readOnly
		if errors.Is(s.Err, errMappingUnknown) {
			t.Skip("needs Linux 6.15")
		}
		if left != (fault.KindOf(s.Err) == fault.Unsupported) {
			t.Errorf("%+v", s)
		}
		if s.Mountpoint == others && !strings.Contains(fmt.Sprint(s.Err), "0 500000 1000") {
			t.Errorf("it does not say which mapping: %v", s.Err)
		}
	}
	for _, place := range []string{whole, sub} {
		r.alive(pod, place)
		r.onlyHealthy(pod, place, 1)
		if uid, gid := r.ownerOf(pod, place); uid != 300_000 || gid != 300_000 {
			t.Errorf("%s is %d:%d's, want the container's root's", place, uid, gid)
		}
	}
	if after := newTree(r.tableOf(pod)).topAt(sub); after.Options != before.Options || after.Root != "/sub" {
		t.Errorf("was %+v\nis  %+v", before, after)
	}
	// A second exit of the client is handled like the first.
	r.restart()
	r.elsewhere()
	r.onlyHealthy(pod, whole, 1)
	r.alive(pod, sub)
}

func TestIDMappedMountOfTheHostStaysStale(t *testing.T) {
	r := newSwapRig(t)
	r.mapped = true
	r.restart()
	target, place := r.bind("target", "/", BindAttrs{}), mkdir(t, r.targets, "a mapped one")
	r.idMap(target, 0, r.userContainer(300_000, ""), place, 0)
	r.restart()
	swapped := r.here(r.swap())
	for _, s := range swapped {
		if (s.Mountpoint == place) != (fault.KindOf(s.Err) == fault.Unsupported) {
			t.Errorf("%+v", s)
		}
	}
	if len(swapped) != 2 {
		t.Errorf("%+v, want the target and the mapped one", swapped)
	}
	r.alive(0, target)
}

func TestMountStaysStaleIfAnIDMappedChildWouldLoseItsMapping(t *testing.T) {
	r := newSwapRig(t)
	r.mapped = true
	r.restart()
	target := r.bind("target", "/", BindAttrs{})
	whole := mkdir(t, r.dir, "whole")
	pod := r.userContainer(300_000, "mount --make-rprivate / &&")
	r.idMap(target, pod, pod, whole, 0)
	r.idMap(target+"/sub", pod, pod, whole+"/real", 0)
	before := newTree(r.tableOf(pod)).topAt(whole)
	r.restart()
	left := 0
	for _, s := range r.elsewhere() {
		if s.Mountpoint == whole {
			left++
			if fault.KindOf(s.Err) != fault.Precondition || !strings.Contains(s.Err.Error(), whole+"/real") {
				t.Errorf("%+v", s)
			}
		}
	}
	if after := newTree(r.tableOf(pod)).topAt(whole); left != 1 || after.ID != before.ID {
		t.Errorf("left %d times; was %+v\nis  %+v", left, before, after)
	}
}

func TestMappingsAreNormalized(t *testing.T) {
	one := newIDMapping([]string{"0 1000 10", "10 5000 1"}, []string{"0 1000 10"})
	for _, tt := range []struct {
		users, groups string
		same          bool
	}{
		{"         0       1000         10\n        10       5000          1\n", "0 1000 10\n", true},
		{"10 5000 1\n0 1000 10\n", "0 1000 10", true},
		{"0 1000 10\n", "0 1000 10\n", false},
		{"0 1000 10\n10 5000 1\n", "0 1000 11\n", false},
		{"", "", false},
	} {
		if got := newIDMapping(strings.Split(tt.users, "\n"), strings.Split(tt.groups, "\n")); got.equal(one) != tt.same {
			t.Errorf("%q, %q: %v", tt.users, tt.groups, got)
		}
	}
}

// statmountAnswer returns the kernel's answer for a mapping.
func statmountAnswer(mask uint64, users, groups []string) []byte {
	buf := make([]byte, statmountStrings, statmountStrings+maxMapping)
	binary.NativeEndian.PutUint64(buf[statmountMask:], mask)
	for at, list := range map[int][]string{statmountUsers: users, statmountGroups: groups} {
		binary.NativeEndian.PutUint32(buf[at:], uint32(len(list)))
		binary.NativeEndian.PutUint32(buf[at+4:], uint32(len(buf)-statmountStrings))
		for _, line := range list {
			buf = append(append(buf, line...), 0)
		}
	}
	return buf[:cap(buf)]
}

func FuzzStatmount(f *testing.F) {
	const both = statmountUIDMap | statmountGIDMap
	f.Add(statmountAnswer(both, []string{"0 300000 1000", "1000 5000 1"}, []string{"0 300000 1000"}))
	f.Add(statmountAnswer(both, nil, nil))
	f.Add(statmountAnswer(statmountUIDMap, nil, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		buf := make([]byte, statmountStrings+maxMapping)
		copy(buf, b)
		m, err := parseStatmount(buf)
		if err == nil && !m.equal(newIDMapping(m.users, m.groups)) {
			t.Errorf("%v is not in its one form", m)
		}
	})
}

func TestParseStatmount(t *testing.T) {
	const both = statmountUIDMap | statmountGIDMap
	users, groups := []string{"0 300000 1000", "1000 5000 1"}, []string{"0 300000 1001"}
	m, err := parseStatmount(statmountAnswer(both, users, groups))
	if err != nil || !m.equal(newIDMapping(users, groups)) {
		t.Errorf("%v, %v", m, err)
	}
	for _, mask := range []uint64{0, statmountUIDMap, statmountGIDMap} {
		if _, err := parseStatmount(statmountAnswer(mask, users, groups)); !errors.Is(err, errMappingUnknown) {
			t.Errorf("mask %#x: %v", mask, err)
		}
	}
	buf := statmountAnswer(both, users, groups)
	binary.NativeEndian.PutUint32(buf[statmountUsers+4:], 1<<31)
	if m, err := parseStatmount(buf); err == nil {
		t.Errorf("an offset outside returns %v", m)
	}
}
