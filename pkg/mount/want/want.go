// Package want defines the mount that a publication asks for.
package want

import (
	"context"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// Mount is the mount that a publication asks for: one of Spec at Publication's target, with the credentials of Grant.
type Mount struct {
	Publication state.Publication // without its Mount
	Spec        mount.Spec
	Identity    string       // whose credentials they are, for the log
	Grant       *creds.Grant // the credentials that the request supplies
	// Plan plans the credentials of another spec from those that the request supplies.
	Plan func(ctx context.Context, spec mount.Spec) (*creds.Grant, error)
	// Linger is how long the mount may outlive its last publication; 0: not at all.
	Linger time.Duration
	// At is the name of the mount at the target if that was rotated to Spec, so that its key is not Spec's; else "".
	At string
}

// Lease is a running mount for a publication. Its key stays locked until Release, so that the caller can bind the mount.
type Lease struct {
	Mount state.Mount
	// Abandon releases a publication that was recorded and could not be bound. It ends a mount that has no other.
	Abandon func(ctx context.Context) error
	Release func()
}

// Key returns the key of the mount.
func (w Mount) Key() string {
	if w.At != "" {
		return mount.KeyOf(w.At)
	}
	return w.Spec.Key()
}

// PublicationOn returns the publication with its Mount set to m.
func (w Mount) PublicationOn(m state.Mount) state.Publication {
	p := w.Publication
	p.Mount = m.Name
	return p
}
