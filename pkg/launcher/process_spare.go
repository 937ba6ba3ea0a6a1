package launcher

import (
	"context"
	"net/netip"
)

// Prepares reports whether a helper can be started as a spare and later become that of a mount. The mount namespace of a Resolver
// may not show the directories that it gets then. Nothing denies helpers of this launcher any address.
func (p *Process) Prepares([]netip.Addr) bool { return p.view == nil || !p.view.alone.Load() }

// Limit does nothing, because this launcher enforces no limits.
func (p *Process) Limit(context.Context, Unit) error { return nil }

// Describe does nothing, because processes have no descriptions.
func (p *Process) Describe(context.Context, Unit) error { return nil }
