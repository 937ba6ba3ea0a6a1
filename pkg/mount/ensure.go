package mount

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// ensure gives a running mount for the spec. The key's lock is held, so no other life of it begins or ends meanwhile. Where
// a mount of another key has to drain before a new one starts, the error is a drainsFirstError.
func (m *Manager) ensure(ctx context.Context, r Request, spec Spec, s *supply) (record, error) {
	key := spec.Key()
	var all []record
	if err := m.do(ctx, func() (err error) { all, err = m.store.recordsOf(key); return err }); err != nil {
		return record{}, err
	}
	for _, rec := range all {
		if rec.Superseded {
			continue
		}
		if rec.Spec.encode() != spec.encode() {
			return record{}, fmt.Errorf("mount %s has this volume's key and another spec: remove %s once its pods are gone", rec.Name, m.store.mountDir(rec.Name))
		}
		if !rec.joinable(spec) {
			continue // it serves another secret's owner by now
		}
		switch rec.Phase {
		case phaseStarting:
			if err := m.discard(ctx, rec); err != nil {
				return record{}, err
			}
		case phaseEnding:
			// What it was given must be stored before another life of it reads and writes the same prefix.
			if err := m.end(ctx, rec, successor{supply: s}); err != nil {
				return record{}, fmt.Errorf("waiting for the mount's previous life to end: %w", err)
			}
		default:
			return rec, m.reuse(ctx, &rec, s)
		}
	}
	if err := m.drainedFirst(ctx, spec); err != nil {
		return record{}, err
	}
	return m.start(ctx, birth{volumeID: r.VolumeID, identity: r.Identity, spec: spec, supply: s})
}

// reuse sees to it that a mount that is there already serves, with current credentials. Where its client is dead, or is not what
// it should be, it is mended first, and so are its other publications; another mount may have taken its place then.
func (m *Manager) reuse(ctx context.Context, rec *record, s *supply) error {
	life, err := m.lifeOf(ctx, *rec)
	if err != nil {
		return err
	}
	old, err := m.outdated(*rec)
	if err != nil {
		return err
	}
	switch {
	case life == orphaned:
		*rec, err = m.renew(ctx, *rec, s, reasonHelper)
		return err
	case life == alive && old:
		*rec, err = m.renew(ctx, *rec, s, reasonConfig)
		return err
	case life == alive:
		return m.handOver(ctx, *rec, s)
	}
	if err := m.restart(ctx, rec, s); err != nil {
		return err
	}
	return m.healOnce(ctx, *rec, true)
}

// life is what a mount's client is about.
type life int

const (
	dead life = iota
	alive
	orphaned // it serves, and its helper, which could end it or renew its keys, is gone
)

// lifeOf finds out about a mount's client: by its helper's word, and by the file system's own, because a helper takes a
// moment to hear of a death. What does not answer is not dead: an error.
func (m *Manager) lifeOf(ctx context.Context, rec record) (life, error) {
	hctx, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	status, err := m.peer(rec.Name).Hello(hctx)
	now := alive
	switch {
	case errors.Is(err, helper.ErrGone):
		if left, err := m.Launcher.Alive(ctx, rec.UID); err != nil || !left {
			return dead, err
		}
		now = orphaned
	case err != nil:
		return dead, fault.Errorf(fault.Unavailable, "the helper of mount %s does not say whether its client lives: %w", rec.Name, err)
	case status.State != helper.StateRunning || rec.Phase != phaseRunning:
		return dead, nil
	}
	var source host.Place
	if err := m.do(ctx, func() (err error) {
		source, err = host.Look(m.store.sourceDir(rec.Name))
		return ignoreMissing(err)
	}); err != nil {
		return dead, err
	}
	if !source.Mountpoint {
		if now == alive {
			now = dead
		}
		return now, nil
	}
	actx, cancel := context.WithTimeout(host.For(ctx, account(rec.Source)), answerBound)
	defer cancel()
	if _, err = m.Namespace.Statfs(actx, m.store.sourceDir(rec.Name)); errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) {
		return dead, nil
	}
	return now, nil
}
