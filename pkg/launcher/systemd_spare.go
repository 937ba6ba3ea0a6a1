package launcher

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Prepares reports whether a unit can be started as a spare and later become that of a mount that needs these addresses. With Landlock,
// the directories of a spare can get other paths; a mount namespace of its own would show the former ones.
func (s *Systemd) Prepares(needs []netip.Addr) bool {
	own := s.sandbox.nameservers
	return s.sandbox.confines() && len(metadata(slices.Concat(own, needs))) == len(metadata(own)) && (s.view == nil || !s.view.alone.Load())
}

// Limit gives the unit of a spare, which has the default limits, those of its mount.
func (s *Systemd) Limit(ctx context.Context, u Unit) error {
	if err := u.Limits.check(); err != nil {
		return fmt.Errorf("limit %s: %w", unitName(u.Name), err)
	}
	limits := u.Limits.or(s.defaults)
	if limits == s.defaults {
		return nil
	}
	return s.set(ctx, "limit "+unitName(u.Name), u, limits.properties())
}

// Describe gives the unit of a spare the description of its mount.
func (s *Systemd) Describe(ctx context.Context, u Unit) error {
	return s.set(ctx, "describe "+unitName(u.Name), u, []Property{{"Description", oneLine(u.Description)}})
}

// set changes properties of a running unit until it ends. A property that the host's systemd does not know is left out, as in Start.
func (s *Systemd) set(ctx context.Context, what string, u Unit, props []Property) error {
	if !validUnitName(u.Name) {
		return fault.Errorf(fault.Invalid, "%s: invalid name %q", what, u.Name)
	}
	return s.systemd.call(ctx, what, func(ctx context.Context, b *bus) error {
		return b.conn.SetUnitPropertiesContext(ctx, unitName(u.Name), true, wire(s.sandbox.supported(props))...)
	})
}
