//go:build linux

package host

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSlaveOfATargetBecomesASlaveOfItsReplacement has slaves of a target, as containers with HostToContainer have.
func TestSlaveOfATargetBecomesASlaveOfItsReplacement(t *testing.T) {
	for _, onTop := range []bool{false, true} {
		r := newSwapRig(t)
		target := r.bind("target", "/", BindAttrs{Shared: true})
		slave, sub := mkdir(t, r.targets, "slave"), mkdir(t, r.targets, "sub of a slave")
		for from, to := range map[string]string{target: slave, target + "/sub": sub} {
			r.run(func() error { return unix.Mount(from, to, "", unix.MS_BIND, "") },
				func() error { return unix.Mount("", to, "", unix.MS_SLAVE, "") },
				func() error { return unix.Mount("", to, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "") })
		}
		group := mountAt(t, r.n, target).peerGroup()
		if m := mountAt(t, r.n, slave); group == "" || !hasOption(strings.Join(m.Optional, ","), "master:"+group) {
			t.Fatalf("%+v of group %q", m, group)
		}
		for range 2 {
			r.restart()
			s := r.swap()
			s.onTop = onTop
			groups, err := r.n.HoldGroups(t.Context(), mountsAt(t, r.n, target))
			if err != nil {
				t.Fatal(err)
			}
			s.Groups = groups
			for _, place := range []string{target, slave, sub} {
				swapped, err := r.n.SwapHere(t.Context(), s, func(m Mount) bool { return m.Mountpoint == place })
				if err != nil {
					t.Fatal(err)
				}
				r.all(swapped, 1)
				r.alive(0, place)
			}
			groups.Close()
			now := r.seenAt(target).peerGroup()
			for _, place := range []string{slave, sub} {
				if m := r.seenAt(place); now == "" || !hasOption(strings.Join(m.Optional, ","), "master:"+now) || !m.ReadOnly() {
					t.Errorf("on top %t: %+v is no read-only slave of group %q", onTop, m, now)
				}
			}
		}
		// A mount in the volume on the host propagates to the slaves, and so does its unmount.
		r.run(func() error { return unix.Mount("tmpfs", target+"/sub/deep", "tmpfs", 0, "") })
		for _, place := range []string{slave + "/sub/deep", sub + "/deep"} {
			if m := r.seenAt(place); m.FSType != "tmpfs" {
				t.Errorf("on top %t: %s shows %+v", onTop, place, m)
			}
		}
		r.run(func() error { return Unmount(target + "/sub/deep") })
	}
}
