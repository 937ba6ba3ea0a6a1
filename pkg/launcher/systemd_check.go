package launcher

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// ErrNoSystemd means that the host has no systemd, or one that is too old.
var ErrNoSystemd = errors.New("the host has no suitable systemd to launch helpers")

// Check asks the host's systemd for its version and the properties that it knows. An error wraps ErrNoSystemd if the host has no
// systemd, or one that is too old.
func (s *Systemd) Check(ctx context.Context) (Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var version string
	var known map[string]any
	check := func(ctx context.Context, b *bus) error {
		quoted, err := b.conn.GetManagerProperty("Version")
		if err != nil {
			return fmt.Errorf("read systemd's version: %w", err)
		}
		if version, err = strconv.Unquote(quoted); err != nil {
			return fmt.Errorf("read systemd's version: %w", err)
		}
		// systemd lists the properties of a service that does not exist, too
		known, err = b.conn.GetUnitTypePropertiesContext(ctx, unitName("probe"), "Service")
		return err
	}
	// If no socket answers and systemd did not boot the host, there is nothing to wait for. A systemd that re-executes itself is
	// back in a moment.
	err := s.systemd.callOnce(ctx, check)
	if none := (connectError)(nil); errors.As(err, &none) && none.absent() {
		booted, berr := bootedWithSystemd(ctx, s.ns)
		if berr != nil {
			return Sandbox{}, berr
		}
		if !booted {
			return Sandbox{}, fault.Errorf(fault.Precondition, "%w: %w", ErrNoSystemd, err)
		}
	}
	if err != nil {
		err = s.systemd.call(ctx, "read the properties of systemd", check)
	}
	if err != nil {
		return Sandbox{}, err
	}
	number, err := parseVersion(version)
	if err != nil {
		return Sandbox{}, err
	}
	if number < minSystemd {
		return Sandbox{}, fault.Errorf(fault.Precondition, "%w: its version is %s, but %d or newer is required", ErrNoSystemd, version, minSystemd)
	}
	unified, err := unifiedCgroups(ctx, s.ns)
	if err != nil {
		return Sandbox{}, fmt.Errorf("read the host's cgroups: %w", err)
	}
	if err := s.checkMounts(ctx); err != nil {
		return Sandbox{}, err
	}
	s.sandbox.update(version, known, unified)
	return s.Sandbox(), nil
}

// checkMounts determines whether new units may have a mount namespace.
func (s *Systemd) checkMounts(ctx context.Context) error {
	if s.sandbox.confines() {
		return nil
	}
	shared, err := sharedRoot(ctx, s.ns)
	if err == nil {
		s.sandbox.setShared(ctx, shared)
	}
	return err
}

// ResolvesBy reports whether units resolve names by the launcher's Resolver, and if not, why.
func (s *Systemd) ResolvesBy() (bool, string) { return s.sandbox.resolves() }

// Sandbox returns the state of the sandbox, as seen by the last Check and the starts since then.
func (s *Systemd) Sandbox() Sandbox { return s.sandbox.report() }

// parseVersion returns the number at the beginning of a version: "252.38-1~deb12u1", "v255", "249 (249-10.el9)".
func parseVersion(version string) (int, error) {
	digits := strings.TrimPrefix(version, "v")
	if end := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		digits = digits[:end]
	}
	n, err := strconv.Atoi(digits)
	if err != nil {
		return 0, fmt.Errorf("%q is not a systemd version", version)
	}
	return n, nil
}

// unifiedCgroups reports whether the host has the unified cgroup hierarchy, which filters of addresses need.
func unifiedCgroups(ctx context.Context, ns Doer) (bool, error) {
	return host.Call(ctx, ns, "reading the host's cgroups", nil, func() (bool, error) {
		var st unix.Statfs_t
		err := unix.Statfs("/sys/fs/cgroup", &st)
		return st.Type == unix.CGROUP2_SUPER_MAGIC, err
	})
}

// sharedRoot reports whether the host's / is a shared mount, so that an unmount on the host propagates to the mount namespaces of
// its services. That is systemd's default. A mount namespace begins with copies of all mounts. If / is private, the copies stay
// after an unmount, and those that systemd (before 254 at least) hides below the new root cannot be reached. Each copy pins its
// file system as long as the service runs, so the client would never exit.
func sharedRoot(ctx context.Context, ns Doer) (bool, error) {
	return host.Call(ctx, ns, "reading the host's mount table", nil, func() (bool, error) {
		roots, err := host.ThreadMounts(func(m host.Mount) bool { return m.Mountpoint == "/" })
		return len(roots) > 0 && roots[len(roots)-1].Shared(), err
	})
}

// bootedWithSystemd reports whether systemd booted the host, as sd_booted(3) does.
func bootedWithSystemd(ctx context.Context, ns Doer) (bool, error) {
	return host.Call(ctx, ns, "checking for systemd on the host", nil, func() (bool, error) {
		fi, err := os.Lstat("/run/systemd/system")
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return err == nil && fi.IsDir(), err
	})
}
