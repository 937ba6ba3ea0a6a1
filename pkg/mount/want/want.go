// Package want says what a publication wants of the mounts of the node.
package want

import (
	"context"

	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// Mount is what a publication wants: a mount of Spec at Publication's target, with the credentials of Grant.
type Mount struct {
	Publication state.Publication // without its Mount
	Spec        mount.Spec
	Identity    string       // whose credentials they are, for the log
	Grant       *creds.Grant // what the request supplies
	// Plan plans the credentials of another spec, with what the request supplies.
	Plan func(ctx context.Context, spec mount.Spec) (*creds.Grant, error)
	// At is the name of the mount at the target if that was rotated to Spec, so that its key is not Spec's; else "".
	At string
}

// Key is the key of the mount that is wanted.
func (w Mount) Key() string {
	if w.At != "" {
		return mount.KeyOf(w.At)
	}
	return w.Spec.Key()
}

// PublicationOn is the publication on a mount.
func (w Mount) PublicationOn(m state.Mount) state.Publication {
	p := w.Publication
	p.Mount = m.Name
	return p
}
