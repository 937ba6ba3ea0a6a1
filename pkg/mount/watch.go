package mount

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

// tendBound bounds what is done for a mount whose client died.
const tendBound = 2 * time.Minute

// goneAgain is when a mount that was as it should be is looked at again, if its helper is gone: nobody tells of its client's
// death any more.
const goneAgain = 3 * time.Second

// watchers wait for the ends of mounts' clients, one for each mount, while the manager runs.
type watchers struct {
	mu    sync.Mutex
	on    map[string]bool
	begin func(name string) // nil: the manager does not run
	wg    sync.WaitGroup
}

// follow begins to watch a mount, if nobody does.
func (w *watchers) follow(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.begin == nil || w.on[name] {
		return
	}
	if w.on == nil {
		w.on = map[string]bool{}
	}
	w.on[name] = true
	begin := w.begin
	w.wg.Go(func() {
		begin(name)
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.on, name)
	})
}

// start lets watchers begin, stop keeps new ones from beginning and waits for the others.
func (w *watchers) start(begin func(name string)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begin = begin
}

func (w *watchers) stop() {
	w.start(nil)
	w.wg.Wait()
}

// watch tends to a mount as soon as its client, or its helper, ends. It returns with ctx, or when the mount is gone.
func (m *Manager) watch(ctx context.Context, name string) {
	peer := m.peer(name)
	for since := uint64(0); ctx.Err() == nil; {
		status, err := peer.Status(ctx, since)
		if err == nil {
			m.observe(ctx, name, status)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && (status.State == helper.StateRunning || status.State == helper.StateIdle || status.Ending):
			since = status.Revision
			continue
		case err != nil && !errors.Is(err, helper.ErrGone):
			klog.FromContext(ctx).V(4).Info("A helper does not answer", "mount", name, "error", err.Error())
		}
		again, gone := m.attend(ctx, name)
		if gone {
			return
		}
		without := again
		if again == 0 {
			again, without = reconcileEvery, goneAgain
		}
		since = 0
		m.rest(ctx, peer, status.Revision, again, without)
	}
}

// rest waits for d, or until the helper has something new to tell, but no longer than without where there is no helper.
func (m *Manager) rest(ctx context.Context, peer *helper.Peer, since uint64, d, without time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for began := time.Now(); ctx.Err() == nil; {
		if _, err := peer.Status(ctx, since); err == nil || errors.Is(err, helper.ErrGone) && time.Since(began) >= without {
			return
		}
		select { // there is no helper: another one may come
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// attend tends to one mount, as soon as nobody else is at work on its key.
func (m *Manager) attend(ctx context.Context, name string) (again time.Duration, gone bool) {
	unlock, err := m.keys.Lock(ctx, keyOf(name))
	if err != nil {
		return 0, false
	}
	defer unlock()
	if m.gone(ctx, name) {
		m.forget(name)
		return 0, true
	}
	tctx, cancel := context.WithTimeout(ctx, tendBound)
	defer cancel()
	again, err = m.tend(tctx, name)
	if err != nil && ctx.Err() == nil {
		m.complaints.log(ctx, name, err, "The mount is not as it should be; it is tried again", "mount", name)
	}
	return again, m.gone(ctx, name)
}
