package mount

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

// ensure gives a running mount for the spec. The key's lock is held, so no other life of it begins or ends meanwhile.
func (m *Manager) ensure(ctx context.Context, r Request, spec Spec) (record, error) {
	key := spec.Key()
	var (
		all  []record
		pubs []publication
	)
	if err := m.do(ctx, func() (err error) {
		if all, _, err = m.store.records(); err != nil {
			return err
		}
		pubs, err = m.store.allPublications()
		return err
	}); err != nil {
		return record{}, err
	}
	for _, rec := range all {
		if rec.Key != key {
			continue
		}
		if rec.Spec.encode() != spec.encode() {
			return record{}, fmt.Errorf("mount %s has this volume's key and another spec: remove %s once its pods are gone", rec.Name, m.store.mountDir(rec.Name))
		}
		if rec.Phase == phaseStarting {
			if err := m.discard(ctx, rec); err != nil {
				return record{}, err
			}
			continue
		}
		life, err := m.lifeOf(ctx, rec)
		if err != nil {
			return record{}, err
		}
		if life == alive {
			return rec, m.handKeys(ctx, r, rec)
		}
		// What it was given must be stored before another life of it reads and writes the same prefix.
		next := successor{keys: r.Keys, shown: usedElsewhere(pubs, rec.Name, "")}
		switch {
		case rec.Phase == phaseEnding, !usedElsewhere(pubs, rec.Name, r.Target):
			err = m.end(ctx, rec, next)
		case life == dead: // other targets show it; whoever unpublishes the last of them ends it
			err = m.drain(ctx, rec, next)
		}
		if err != nil {
			return record{}, fmt.Errorf("waiting for the mount's previous life to end: %w", err)
		}
	}
	return m.start(ctx, r, spec)
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
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return dead, err
	}
	if _, mounted := mountedAt(mounts, m.store.sourceDir(rec.Name)); !mounted {
		if now == alive {
			now = dead
		}
		return now, nil
	}
	actx, cancel := context.WithTimeout(ctx, answerBound)
	defer cancel()
	if _, err = m.Namespace.Statfs(actx, m.store.sourceDir(rec.Name)); errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) {
		return dead, nil
	}
	return now, nil
}
