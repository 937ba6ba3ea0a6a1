// Package spares keeps helpers ready for mounts that do not exist yet, so that a new mount does not wait for the start of its helper.
package spares

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/sockets"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/uids"
)

const (
	// One spare is kept, and twice as many after a mount found none, for a while: pods tend to come together.
	minSpares = 1
	maxSpares = 8
	// spareDecay is after how long without such a mount only half as many spares are kept.
	spareDecay = time.Minute
	// spareCheck is the interval between two checks of a spare. A helper that no driver asks for two minutes exits.
	spareCheck = 30 * time.Second
	// sparePatience is how long new spares wait for mounts that are being started, from which they would take CPU time. A hundred mounts
	// on two processors take about four seconds.
	sparePatience = 10 * time.Second
	spareRetry    = 30 * time.Second // after a failure
	spareBound    = 20 * time.Second // for a spare to start
	spareEndBound = 3 * time.Second  // for all spares to exit when the driver does
	cleanupBound  = 20 * time.Second // for the end of a spare
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

// Launcher starts helpers and kills them.
type Launcher interface {
	Start(ctx context.Context, u launcher.Unit) error
	// Kill kills the processes of a uid and returns when they have exited.
	Kill(ctx context.Context, uid uint32) error
}

// Options are the parts of a Pool.
type Options struct {
	Namespace *host.Namespace
	Launcher  Launcher
	Preparer  Preparer // nil: the launcher starts no helpers ahead of need
	UIDs      *uids.Allocator
	Store     *state.Store
	Tracker   *tracker.Tracker
}

// Pool holds the helpers that no mount uses yet. Each of these spares has a uid and directories of its own, which become the mount's.
type Pool struct {
	parts Options
	wake  chan struct{} // something may have to be done

	mu        sync.Mutex
	ready     []state.Spare
	discarded []state.Spare   // to be ended
	described []launcher.Unit // of mounts that have taken spares, to be described
	starting  int             // mounts
	busySince time.Time       // since when there are such mounts
	target    int             // how many spares to keep
	decays    time.Time       // when target decreases
	checked   time.Time       // when the spares were checked
	stopped   bool
}

// New returns a pool without spares.
func New(o Options) *Pool {
	return &Pool{parts: o, wake: make(chan struct{}, 1), target: minSpares}
}

// Begin records that a mount is being started, until end is called, and gives it a spare, if there is one that suits it.
func (p *Pool) Begin(needs []netip.Addr) (spare *state.Spare, end func()) {
	if p.parts.Preparer == nil {
		return nil, func() {}
	}
	suits := p.parts.Preparer.Prepares(needs)
	defer func() {
		if spare != nil {
			failpoint.Here("spare.taken")
		}
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.starting++; p.starting == 1 {
		p.busySince = time.Now()
	}
	switch {
	case p.stopped, !suits:
	case len(p.ready) > 0:
		first := p.ready[0]
		spare, p.ready = &first, slices.Delete(p.ready, 0, 1)
		p.countReady()
	default:
		p.target, p.decays = min(2*p.target, maxSpares), time.Now().Add(spareDecay)
		p.parts.Tracker.Metrics.SpareRequests.WithLabelValues(tracker.SpareMissing).Inc()
	}
	return spare, sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.starting--
		p.wakeUp()
	})
}

// Discard has a spare ended that no mount can use.
func (p *Pool) Discard(spare state.Spare) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.discarded = append(p.discarded, spare)
	p.wakeUp()
}

// DescribeLater has the unit of a mount described that was a spare. No mount waits for it.
func (p *Pool) DescribeLater(u launcher.Unit) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.described = append(p.described, u)
	p.wakeUp()
}

func (p *Pool) wakeUp() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// countReady updates the metric. Call under mu.
func (p *Pool) countReady() { p.parts.Tracker.Metrics.Spares.Set(float64(len(p.ready))) }

// Run ends the spares of the driver before this one, keeps helpers ready for new mounts until ctx ends, and then ends those that no mount
// has taken.
func (p *Pool) Run(ctx context.Context) {
	p.endFormer(ctx)
	if p.parts.Preparer != nil {
		p.keepReady(ctx)
	}
}

// endFormer ends the spares of the driver before this one, which may have had another version, launcher or range of uids.
func (p *Pool) endFormer(ctx context.Context) {
	former, err := p.parts.Store.Spares(ctx)
	for _, spare := range former {
		err = errors.Join(err, p.endSpare(ctx, spare))
	}
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Cannot end spare helpers of former driver")
	}
}

// endSpare has a spare exit, kills it if it does not, and removes what it leaves when its process has ended: until then, its directories reserve
// its uid. Nothing is killed where no helper listens, because the uid may already be that of a mount that took the spare, nor where the
// uid is unknown because the spare's cache is gone.
func (p *Pool) endSpare(ctx context.Context, spare state.Spare) error {
	_, err := p.quitSpare(ctx, spare)
	if spare.UID == 0 || errors.Is(err, helper.ErrGone) {
		return p.parts.Store.RemoveSpare(ctx, spare.Name)
	}
	return p.killSpare(ctx, spare)
}

// quitSpare has a spare exit, and waits until it has: a unit whose process is killed fails, and launcher process would leave it. exited is
// false if that is not certain.
func (p *Pool) quitSpare(ctx context.Context, spare state.Spare) (exited bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, assignBound)
	defer cancel()
	status, err := p.peer(spare).Quit(ctx)
	if err != nil {
		return false, err
	}
	return host.AwaitExit(ctx, status.PID, spare.UID), nil
}

func (p *Pool) keepReady(ctx context.Context) {
	defer p.endAll(context.WithoutCancel(ctx))
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-p.wake:
		case <-time.After(p.workOnce(ctx)):
		}
	}
}

// workOnce does the next piece of work and returns after how long there may be more.
func (p *Pool) workOnce(ctx context.Context) time.Duration {
	if wait := p.startsWait(); wait > 0 {
		return wait
	}
	if p.describe(ctx) {
		return 0
	}
	if done, err := p.endDiscarded(ctx); done || err != nil {
		return p.pauseAfter(ctx, err, "Cannot end spare helper")
	}
	p.checkReady(ctx)
	missing, discarded := p.adjust()
	switch {
	case discarded:
		return 0
	case !missing:
		return spareCheck
	}
	failpoint.Here("spare.missing")
	err := p.start(ctx)
	if fault.Is(err, fault.Unsupported) { // the launcher prepares none from now on
		klog.FromContext(ctx).Info("No spare helpers", "reason", err.Error())
		return spareCheck
	}
	return p.pauseAfter(ctx, err, "Cannot start spare helper")
}

// startsWait returns how long to wait for mounts that are being started.
func (p *Pool) startsWait() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.starting == 0 {
		return 0
	}
	return sparePatience - time.Since(p.busySince)
}

func (p *Pool) pauseAfter(ctx context.Context, err error, what string) time.Duration {
	if err == nil || ctx.Err() != nil {
		return 0
	}
	p.parts.Tracker.LogError(ctx, "spares", err, what, "retryIn", spareRetry)
	return spareRetry
}

// describe describes a unit, and reports whether there was one to describe.
func (p *Pool) describe(ctx context.Context) bool {
	p.mu.Lock()
	if len(p.described) == 0 {
		p.mu.Unlock()
		return false
	}
	u := p.described[0]
	p.described = p.described[1:]
	p.mu.Unlock()
	if err := p.parts.Preparer.Describe(ctx, u); err != nil { // its mount may be gone
		klog.FromContext(ctx).V(2).Info("Cannot describe unit", "unit", u.Name, "error", err.Error())
	}
	return true
}

// endDiscarded ends a discarded spare, and reports whether there was one.
func (p *Pool) endDiscarded(ctx context.Context) (done bool, err error) {
	p.mu.Lock()
	if len(p.discarded) == 0 {
		p.mu.Unlock()
		return false, nil
	}
	spare := p.discarded[0]
	p.mu.Unlock()
	// A spare that exits leaves no process, because it has started none. So systemd need not be asked for its units.
	if exited, _ := p.quitSpare(ctx, spare); exited {
		err = p.parts.Store.RemoveSpare(ctx, spare.Name)
	} else {
		err = p.killSpare(ctx, spare)
	}
	if err != nil {
		return false, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.discarded = p.discarded[1:]
	return true, nil
}

// killSpare ends a spare and removes what it leaves.
func (p *Pool) killSpare(ctx context.Context, spare state.Spare) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupBound)
	defer cancel()
	if err := p.parts.Launcher.Kill(ctx, spare.UID); err != nil {
		return err
	}
	return p.parts.Store.RemoveSpare(ctx, spare.Name)
}

// checkReady discards the spares that do not answer, and all if the launcher can use none any more.
func (p *Pool) checkReady(ctx context.Context) {
	p.mu.Lock()
	due := time.Since(p.checked) >= spareCheck
	if due {
		p.checked = time.Now()
	}
	ready := slices.Clone(p.ready)
	p.mu.Unlock()
	if !due {
		return
	}
	prepares := p.parts.Preparer.Prepares(nil)
	for _, spare := range ready {
		err := p.askSpare(ctx, spare)
		if ctx.Err() != nil || err == nil && prepares {
			continue
		}
		if err != nil {
			klog.FromContext(ctx).Info("Spare helper does not answer, ending it", "unit", spare.Name, "error", err.Error())
		}
		p.mu.Lock()
		if i := slices.Index(p.ready, spare); i >= 0 { // no mount has taken it meanwhile
			p.ready = slices.Delete(p.ready, i, i+1)
			p.discarded = append(p.discarded, spare)
			p.countReady()
		}
		p.mu.Unlock()
	}
}

// askSpare reports why a spare cannot be used.
func (p *Pool) askSpare(ctx context.Context, spare state.Spare) error {
	ctx, cancel := context.WithTimeout(ctx, spareAskBound)
	defer cancel()
	status, err := p.peer(spare).Status(ctx)
	if err == nil && status.State != helper.StateIdle {
		err = fmt.Errorf("its state is %s", status.State)
	}
	return err
}

func (p *Pool) peer(spare state.Spare) *helper.Peer {
	return sockets.Peer(p.parts.Namespace, p.parts.Store.SpareSocket(spare.Name))
}

// adjust reports whether a spare must be started. It discards one if there are too many.
func (p *Pool) adjust() (missing, discarded bool) {
	prepares := p.parts.Preparer.Prepares(nil)
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := time.Now(); p.target > minSpares && now.After(p.decays) {
		p.target, p.decays = max(p.target/2, minSpares), now.Add(spareDecay)
	}
	if last := len(p.ready) - 1; last >= p.target {
		p.discarded, p.ready = append(p.discarded, p.ready[last]), p.ready[:last]
		p.countReady()
		return false, true
	}
	return len(p.ready) < p.target && prepares, false
}

// start starts a spare. On failure nothing of it is left.
func (p *Pool) start(ctx context.Context) error {
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), spareBound)
	defer cancel()
	// A start that is given up may leave a helper that nothing names. So the end of the driver waits for it.
	defer context.AfterFunc(ctx, func() { time.AfterFunc(spareEndBound, cancel) })()
	spare, err := p.parts.UIDs.AllocateSpare(sctx)
	if err != nil {
		return err
	}
	failpoint.Here("spare.made")
	if err := p.launch(sctx, spare); err != nil {
		return errors.Join(err, p.killSpare(context.WithoutCancel(ctx), spare))
	}
	failpoint.Here("spare.started")
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready = append(p.ready, spare)
	p.countReady()
	klog.FromContext(ctx).V(2).Info("Spare helper ready", "unit", spare.Name, "uid", spare.UID)
	return nil
}

// launch starts the helper of a spare and returns when it answers.
func (p *Pool) launch(ctx context.Context, spare state.Spare) error {
	socket, err := sockets.Listen(ctx, p.parts.Namespace, spare.Name, p.parts.Store.SpareSocket(spare.Name))
	if err != nil {
		return err
	}
	err = p.parts.Launcher.Start(ctx, launcher.Unit{
		Name: spare.Name, Description: "S3 helper without a volume yet", UID: spare.UID, GID: spare.UID, Spare: true,
		StateDir: p.parts.Store.SpareHelperDir(spare.Name), CacheDir: p.parts.Store.CacheDir(spare.Name), Socket: socket,
	})
	socket.Close()
	if err != nil {
		return err
	}
	return p.askSpare(ctx, spare)
}

// endAll ends all spares. The next driver ends those that remain.
func (p *Pool) endAll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, spareEndBound)
	defer cancel()
	p.mu.Lock()
	p.stopped = true
	all := slices.Concat(p.ready, p.discarded)
	p.ready, p.discarded = nil, nil
	p.countReady()
	p.mu.Unlock()
	var g errgroup.Group
	for _, spare := range all {
		g.Go(func() error { return p.endSpare(ctx, spare) })
	}
	g.Go(func() error {
		for more := true; more && ctx.Err() == nil; {
			more = p.describe(ctx)
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		klog.FromContext(ctx).V(2).Info("Spare helpers are left to the next driver", "error", err.Error())
	}
}

// Assign makes a mount's spare, at peer, its helper.
func (p *Pool) Assign(ctx context.Context, peer *helper.Peer, u launcher.Unit) error {
	var g errgroup.Group
	g.Go(func() error {
		ctx, cancel := context.WithTimeout(ctx, assignBound)
		defer cancel()
		return peer.Assign(ctx, helper.Assignment{Name: u.Name, StateDir: u.StateDir, CacheDir: u.CacheDir})
	})
	g.Go(func() error { return p.parts.Preparer.Limit(ctx, u) })
	return g.Wait()
}
