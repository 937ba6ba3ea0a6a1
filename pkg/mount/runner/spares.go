package runner

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	// One spare is kept, and twice as many after a mount found none, for a while: pods tend to come together.
	minSpares = 1
	maxSpares = 8
	// spareDecay is after how long without such a mount only half as many spares are kept.
	spareDecay = time.Minute
	// spareCheck is the interval between two checks of a spare. A helper that no driver asks for two minutes exits.
	spareCheck = 30 * time.Second
	// sparePatience is how long new spares wait for mounts that are being started, from which they would take CPU time.
	sparePatience = 2 * time.Second
	spareRetry    = 30 * time.Second // after a failure
	spareBound    = 20 * time.Second // for a spare to start
	spareEndBound = 3 * time.Second  // for all spares to exit when the driver does
	assignBound   = time.Second      // for a spare to take its mount; otherwise it is killed, and another helper is started
	spareAskBound = 5 * time.Second  // for a spare to answer a check
)

// Preparer is a launcher whose helpers can be started before their mounts.
type Preparer interface {
	// Prepares reports whether a spare can become the helper of a mount that needs these addresses.
	Prepares(needs []netip.Addr) bool
	// Limit gives a spare the limits of its mount, Describe the description.
	Limit(ctx context.Context, u launcher.Unit) error
	Describe(ctx context.Context, u launcher.Unit) error
}

// spares keeps helpers that no mount uses yet, so that a new mount does not wait for the start of its helper. A spare has a uid and
// directories of its own, which become the mount's.
type spares struct {
	*Options
	uids *uids
	wake chan struct{} // something may have to be done

	mu        sync.Mutex
	ready     []state.Spare
	condemned []state.Spare   // to be killed
	described []launcher.Unit // of mounts that have taken spares, to be described
	starting  int             // mounts
	busySince time.Time       // since when there are such mounts
	target    int             // how many spares to keep
	decays    time.Time       // when target decreases
	checked   time.Time       // when the spares were checked
	stopped   bool
}

func newSpares(o *Options, u *uids) *spares {
	return &spares{Options: o, uids: u, wake: make(chan struct{}, 1), target: minSpares}
}

// begin records that a mount is being started, until end is called, and gives it a spare, if there is one that suits it.
func (s *spares) begin(needs []netip.Addr) (spare *state.Spare, end func()) {
	if s.Preparer == nil {
		return nil, func() {}
	}
	suits := s.Preparer.Prepares(needs)
	defer func() {
		if spare != nil {
			failpoint.Here("spare.taken")
		}
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.starting++; s.starting == 1 {
		s.busySince = time.Now()
	}
	switch {
	case s.stopped, !suits:
	case len(s.ready) > 0:
		first := s.ready[0]
		spare, s.ready = &first, slices.Delete(s.ready, 0, 1)
		s.countReady()
	default:
		s.target, s.decays = min(2*s.target, maxSpares), time.Now().Add(spareDecay)
		s.Tracker.CountSpare(tracker.SpareMissing)
	}
	return spare, sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.starting--
		s.hurry()
	})
}

// condemn has a spare killed that no mount can use.
func (s *spares) condemn(spare state.Spare) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.condemned = append(s.condemned, spare)
	s.hurry()
}

// describeLater has the unit of a mount described that was a spare. No mount waits for it.
func (s *spares) describeLater(u launcher.Unit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.described = append(s.described, u)
	s.hurry()
}

func (s *spares) hurry() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// countReady updates the metric. Call under mu.
func (s *spares) countReady() { s.Tracker.SetSpares(len(s.ready)) }

// RunSpares ends the spares of the driver before this one, keeps helpers ready for new mounts until ctx ends, and then ends those that
// no mount has taken.
func (r *Runner) RunSpares(ctx context.Context) {
	r.spares.endFormer(ctx)
	if r.Preparer != nil {
		r.spares.run(ctx)
	}
}

// endFormer ends the spares of the driver before this one, which may have had another version, launcher or range of uids.
func (s *spares) endFormer(ctx context.Context) {
	former, err := s.Store.Spares(ctx)
	for _, spare := range former {
		err = errors.Join(err, s.end(ctx, spare))
	}
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Cannot end spare helpers of former driver")
	}
}

// end has a spare exit, kills it if it does not answer, and removes what it leaves.
func (s *spares) end(ctx context.Context, spare state.Spare) error {
	actx, cancel := context.WithTimeout(ctx, assignBound)
	err := s.peer(spare).Quit(actx)
	cancel()
	if err != nil && !errors.Is(err, helper.ErrGone) && spare.UID != 0 {
		return s.kill(ctx, spare)
	}
	return s.Store.RemoveSpare(ctx, spare.Name)
}

func (s *spares) run(ctx context.Context) {
	defer s.stop(context.WithoutCancel(ctx))
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-s.wake:
		case <-time.After(s.step(ctx)):
		}
	}
}

// step does the next piece of work and returns after how long there may be more.
func (s *spares) step(ctx context.Context) time.Duration {
	if wait := s.busy(); wait > 0 {
		return wait
	}
	if s.describe(ctx) {
		return 0
	}
	if done, err := s.killCondemned(ctx); done || err != nil {
		return s.pause(ctx, err, "Cannot end spare helper")
	}
	s.check(ctx)
	switch s.missing() {
	case 1:
		failpoint.Here("spare.missing")
		return s.pause(ctx, s.start(ctx), "Cannot start spare helper")
	case -1:
		s.condemnOne()
		return 0
	}
	return spareCheck
}

// busy returns how long to wait for mounts that are being started.
func (s *spares) busy() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.starting == 0 {
		return 0
	}
	return sparePatience - time.Since(s.busySince)
}

func (s *spares) pause(ctx context.Context, err error, what string) time.Duration {
	if err == nil || ctx.Err() != nil {
		return 0
	}
	s.Tracker.LogError(ctx, "spares", err, what, "retryIn", spareRetry)
	return spareRetry
}

// describe describes a unit, and reports whether there was one to describe.
func (s *spares) describe(ctx context.Context) bool {
	s.mu.Lock()
	if len(s.described) == 0 {
		s.mu.Unlock()
		return false
	}
	u := s.described[0]
	s.described = s.described[1:]
	s.mu.Unlock()
	if err := s.Preparer.Describe(ctx, u); err != nil { // its mount may be gone
		klog.FromContext(ctx).V(2).Info("Cannot describe unit", "unit", u.Name, "error", err.Error())
	}
	return true
}

// killCondemned ends a condemned spare, and reports whether there was one.
func (s *spares) killCondemned(ctx context.Context) (done bool, err error) {
	s.mu.Lock()
	if len(s.condemned) == 0 {
		s.mu.Unlock()
		return false, nil
	}
	spare := s.condemned[0]
	s.mu.Unlock()
	if err := s.kill(ctx, spare); err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.condemned = s.condemned[1:]
	return true, nil
}

// kill ends a spare and removes what it leaves.
func (s *spares) kill(ctx context.Context, spare state.Spare) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupBound)
	defer cancel()
	if err := s.Launcher.Kill(ctx, spare.UID); err != nil {
		return err
	}
	return s.Store.RemoveSpare(ctx, spare.Name)
}

// check condemns the spares that do not answer, and all if the launcher can use none any more.
func (s *spares) check(ctx context.Context) {
	s.mu.Lock()
	due := time.Since(s.checked) >= spareCheck
	if due {
		s.checked = time.Now()
	}
	ready := slices.Clone(s.ready)
	s.mu.Unlock()
	if !due {
		return
	}
	prepares := s.Preparer.Prepares(nil)
	for _, spare := range ready {
		err := s.ask(ctx, spare)
		if ctx.Err() != nil || err == nil && prepares {
			continue
		}
		if err != nil {
			klog.FromContext(ctx).Info("Spare helper does not answer, ending it", "unit", spare.Name, "error", err.Error())
		}
		s.mu.Lock()
		if i := slices.Index(s.ready, spare); i >= 0 { // no mount has taken it meanwhile
			s.ready = slices.Delete(s.ready, i, i+1)
			s.condemned = append(s.condemned, spare)
			s.countReady()
		}
		s.mu.Unlock()
	}
}

// ask reports why a spare cannot be used.
func (s *spares) ask(ctx context.Context, spare state.Spare) error {
	ctx, cancel := context.WithTimeout(ctx, spareAskBound)
	defer cancel()
	status, err := s.peer(spare).Status(ctx)
	if err == nil && status.State != helper.StateIdle {
		err = fmt.Errorf("its state is %s", status.State)
	}
	return err
}

func (s *spares) peer(spare state.Spare) *helper.Peer {
	return peerAt(s.Namespace, s.Store.SpareSocket(spare.Name))
}

// missing is 1 if a spare must be started, -1 if there is one too many.
func (s *spares) missing() int {
	prepares := s.Preparer.Prepares(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); s.target > minSpares && now.After(s.decays) {
		s.target, s.decays = max(s.target/2, minSpares), now.Add(spareDecay)
	}
	switch {
	case len(s.ready) > s.target:
		return -1
	case len(s.ready) < s.target && prepares:
		return 1
	}
	return 0
}

func (s *spares) condemnOne() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if last := len(s.ready) - 1; last >= 0 {
		s.condemned, s.ready = append(s.condemned, s.ready[last]), s.ready[:last]
		s.countReady()
	}
}

// start starts a spare. On failure nothing of it is left.
func (s *spares) start(ctx context.Context) error {
	sctx, cancel := context.WithTimeout(ctx, spareBound)
	defer cancel()
	spare, err := s.uids.reserveSpare(sctx)
	if err != nil {
		return err
	}
	failpoint.Here("spare.made")
	if err := s.launch(sctx, spare); err != nil {
		return errors.Join(err, s.kill(context.WithoutCancel(ctx), spare))
	}
	failpoint.Here("spare.started")
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready = append(s.ready, spare)
	s.countReady()
	klog.FromContext(ctx).V(2).Info("Spare helper ready", "unit", spare.Name, "uid", spare.UID)
	return nil
}

// launch starts the helper of a spare and returns when it answers.
func (s *spares) launch(ctx context.Context, spare state.Spare) error {
	socket, err := listen(ctx, s.Namespace, spare.Name, s.Store.SpareSocket(spare.Name))
	if err != nil {
		return err
	}
	err = s.Launcher.Start(ctx, launcher.Unit{
		Name: spare.Name, Description: "S3 helper without a volume yet", UID: spare.UID, GID: spare.UID, Spare: true,
		StateDir: s.Store.SpareHelperDir(spare.Name), CacheDir: s.Store.CacheDir(spare.Name), Socket: socket,
	})
	socket.Close()
	if err != nil {
		return err
	}
	return s.ask(ctx, spare)
}

// stop ends all spares. The next driver ends those that remain.
func (s *spares) stop(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, spareEndBound)
	defer cancel()
	s.mu.Lock()
	s.stopped = true
	all := slices.Concat(s.ready, s.condemned)
	s.ready, s.condemned = nil, nil
	s.countReady()
	s.mu.Unlock()
	var g errgroup.Group
	for _, spare := range all {
		g.Go(func() error { return s.end(ctx, spare) })
	}
	g.Go(func() error {
		for more := true; more && ctx.Err() == nil; {
			more = s.describe(ctx)
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		klog.FromContext(ctx).V(2).Info("Spare helpers are left to the next driver", "error", err.Error())
	}
}

// assignSpare makes a mount's spare its helper.
func (r *Runner) assignSpare(ctx context.Context, m state.Mount, u launcher.Unit) error {
	var g errgroup.Group
	g.Go(func() error {
		ctx, cancel := context.WithTimeout(ctx, assignBound)
		defer cancel()
		return r.Peer(m.Name).Assign(ctx, helper.Assignment{Name: m.Name, StateDir: u.StateDir, CacheDir: u.CacheDir})
	})
	g.Go(func() error { return r.Preparer.Limit(ctx, u) })
	return g.Wait()
}

// listen returns a helper's listening socket. An earlier one, of a helper that exited, is replaced.
func listen(ctx context.Context, ns *host.Namespace, name, path string) (*os.File, error) {
	socket, err := host.Call(ctx, ns, "listening for helper "+name, func(f *os.File) { f.Close() }, func() (*os.File, error) {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return nil, err
		}
		return helper.Listen(path)
	})
	if err != nil {
		return nil, fmt.Errorf("making the helper's socket: %w", err)
	}
	return socket, nil
}

// reserveSpare makes the directories of a new spare, which mark its uid as used.
func (u *uids) reserveSpare(ctx context.Context) (state.Spare, error) {
	taken := map[uint32]bool{}
	for {
		spare, err := u.makeSpare(ctx, taken)
		if err != nil {
			return state.Spare{}, fmt.Errorf("allocating a new spare: %w", err)
		}
		free, err := u.Launcher.Free(ctx, spare.UID)
		if err == nil && free {
			return spare, nil
		}
		taken[spare.UID] = true
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		rerr := u.Store.RemoveSpare(cctx, spare.Name)
		cancel()
		if err := errors.Join(err, rerr); err != nil {
			return state.Spare{}, err
		}
	}
}

func (u *uids) makeSpare(ctx context.Context, taken map[uint32]bool) (state.Spare, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	uid, err := u.unused(ctx, "spare", taken)
	if err != nil {
		return state.Spare{}, err
	}
	return u.Store.MakeSpare(ctx, uid)
}
