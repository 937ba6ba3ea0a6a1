// Package podclient publishes volumes whose FUSE client runs in the user's own pod.
//
// A FUSE file system blocks every process that looks at it until its client answers, and the client's container starts after the volume is
// published. So the target first shows an empty, read-only file system. A program in the pod connects to the driver's socket in one of the
// pod's emptyDir volumes. The driver mounts a new FUSE file system in a directory of its own, passes the program the descriptor, and when
// the client answers, it replaces the empty file system by the client's: at the target and inside running containers. When the client has
// exited, the target shows the empty file system again, so that containers can start; those that run keep the client's stale file system,
// whose errors cannot be taken for an empty volume, until the next client answers.
//
// What is on disk, below <state-dir>/podclients, survives the driver:
//
//	<id>.json          the record of a volume; the id is the hash of its target
//	mounts/<id>.empty  its empty file system
//	mounts/<id>.<n>    the file system of its n-th client
//
// Everything else is read from the mount table. Former file systems stay mounted as long as a copy of one exists: their device numbers,
// which must not be reused meanwhile, decide what is stale.
package podclient

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

const (
	// emptyDirBound is how long a publish waits for kubelet to make the emptyDir volume, which it does at the same time.
	emptyDirBound = 5 * time.Second
	emptyDirPause = 20 * time.Millisecond
	// maxOfPod is how many volumes with clients of its own a pod may have. Each costs the driver a socket, and looks at the mount table.
	maxOfPod = 16
	// cleanupBound bounds the clean-up after a failed publish.
	cleanupBound = 20 * time.Second
	// statsBound bounds the answer of a client to a request for statistics.
	statsBound = 10 * time.Second
)

// Connections ends FUSE connections. *host.Fusectl implements it.
type Connections interface {
	Abort(ctx context.Context, minor uint32) error
}

// Options are the parts and settings of a Server.
type Options struct {
	Namespace    *host.Namespace
	Connections  Connections
	StateDir     string                     // without symbolic links
	Resolve      func(target string) string // a target's path as the mount table shows it
	TargetRoot   string                     // without symbolic links; "": targets may be anywhere
	ReadyTimeout time.Duration              // for the first answer of a client that has got its descriptor
	HangTimeout  time.Duration              // after which the connection of a client that does not answer is aborted; 0: never
	Refused      error                      // the reason why nothing can be published on this node, or nil
}

// Server publishes volumes and passes descriptors to their clients.
type Server struct {
	ns      *host.Namespace
	opts    Options
	records records
	places  *pins.Pins // the driver's own mounts: not where users see a file system
	metrics metrics
	locks   conc.Locks // by target

	mu      sync.Mutex
	base    context.Context // of reconcilers; nil while Run does not run
	stopped bool
	active  map[string]*reconciler // by id
	group   sync.WaitGroup
}

// New prepares the directories. It starts nothing.
func New(ctx context.Context, o Options) (*Server, error) {
	r := records{o.Namespace, filepath.Join(o.StateDir, "podclients")}
	s := &Server{ns: o.Namespace, opts: o, records: r, places: pins.New(o.Namespace, r.mounts()), metrics: newMetrics(), active: map[string]*reconciler{}}
	if err := s.records.prepare(ctx); err != nil {
		return nil, fmt.Errorf("preparing %s: %w", s.records.dir, err)
	}
	return s, nil
}

// Run passes descriptors for all published volumes until ctx ends. It unmounts nothing.
func (s *Server) Run(ctx context.Context) {
	s.mu.Lock()
	s.base = ctx
	for _, r := range s.active { // published before
		s.launchReconciler(r)
	}
	s.mu.Unlock()
	s.resumeVolumes(ctx)
	<-ctx.Done()
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	s.group.Wait()
}

// resumeVolumes serves the volumes that an earlier driver published. Records that cannot be read are reported; the others are served.
func (s *Server) resumeVolumes(ctx context.Context) {
	volumes, err := s.records.all(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read records of volumes with clients in pods")
	}
	for _, v := range volumes {
		release, err := s.locks.Lock(ctx, v.Target)
		if err != nil {
			return
		}
		if have, ok, err := s.records.get(ctx, v.Target); err == nil && ok && have == v && !s.removeIfPodGone(ctx, v) {
			_, err = s.reconcile(ctx, v)
			if err != nil {
				klog.FromContext(ctx).Error(err, "Cannot serve volume of a client in a pod", "volume", v.VolumeID, "target", v.Target)
			}
		}
		release()
	}
}

// removeIfPodGone removes a volume whose pod's directory was removed without an unpublish, as by a reset of kubelet, and reports whether it did.
// No request would remove it any more.
func (s *Server) removeIfPodGone(ctx context.Context, v podvolume.Volume) bool {
	ctx, cancel := context.WithTimeout(ctx, cleanupBound)
	defer cancel()
	dir, _, ok := v.Pod()
	if !ok {
		return false
	}
	gone, err := host.Call(ctx, s.ns, "looking for the pod of "+v.Target, nil, func() (bool, error) {
		if _, err := os.Lstat(filepath.Dir(dir)); err != nil { // kubelet's directory may not be there yet
			return false, err
		}
		_, err := os.Lstat(dir)
		return errors.Is(err, fs.ErrNotExist), nil
	})
	if err != nil || !gone {
		return false
	}
	if err := s.removeVolume(ctx, v); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot remove volume of a pod that is gone", "volume", v.VolumeID, "target", v.Target)
		return false
	}
	klog.FromContext(ctx).Info("Removed volume of a pod that is gone", "volume", v.VolumeID, "target", v.Target)
	return true
}

// reconcile makes sure that the volume has a running reconciler and returns it. It waits for one that is stopping, as after an unpublish
// that timed out. The caller holds the target's lock.
func (s *Server) reconcile(ctx context.Context, v podvolume.Volume) (*reconciler, error) {
	s.mu.Lock()
	r := s.active[idOf(v.Target)]
	s.mu.Unlock()
	if r != nil && r.currentProgress().state != Stopped {
		return r, nil
	}
	if r != nil {
		if err := r.awaitEnd(ctx); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r = newReconciler(s, v)
	s.active[idOf(v.Target)] = r
	if s.base != nil {
		s.launchReconciler(r)
	}
	return r, nil
}

// listenForClient makes sure that the driver listens for the clients of a volume.
func (s *Server) listenForClient(ctx context.Context, v podvolume.Volume) error {
	r, err := s.reconcile(ctx, v)
	if err != nil {
		return err
	}
	return r.listen(ctx)
}

// launchReconciler starts a reconciler; mu is held.
func (s *Server) launchReconciler(r *reconciler) {
	if s.stopped || r.cancel != nil {
		return
	}
	ctx, cancel := context.WithCancel(klog.NewContext(s.base, klog.FromContext(s.base).WithValues("volume", r.volume.VolumeID, "target", r.volume.Target)))
	r.cancel = cancel
	s.group.Go(func() {
		defer close(r.done)
		defer cancel()
		r.run(ctx)
	})
}

// stopReconciler stops the reconciler of a target and waits for it. The caller holds the target's lock.
func (s *Server) stopReconciler(ctx context.Context, target string) error {
	s.mu.Lock()
	r := s.active[idOf(target)]
	if r != nil {
		r.setState(Stopped)
		if r.cancel == nil { // Run has not begun
			r.cancel = func() {}
			close(r.done)
		}
		r.cancel()
	}
	s.mu.Unlock()
	if r == nil {
		return nil
	}
	if err := r.awaitEnd(ctx); err != nil {
		return err
	}
	r.closeListener()
	return nil
}

// Has reports whether a volume of this kind is published at a target.
func (s *Server) Has(ctx context.Context, target string) (bool, error) {
	_, ok, err := s.records.get(ctx, s.opts.Resolve(target))
	return ok, err
}

// Publish makes the volume appear at its target, without waiting for its client, and listens for that. It is idempotent. refused is the
// reason to refuse the request, or nil; a volume that is published already stays so nevertheless.
func (s *Server) Publish(ctx context.Context, v podvolume.Volume, refused error) (err error) {
	v.Target = s.opts.Resolve(v.Target)
	release, err := s.locks.Lock(ctx, v.Target)
	if err != nil {
		return fault.Errorf(fault.Busy, "another request for the target is in flight: %w", err)
	}
	defer release()
	have, published, err := s.records.get(ctx, v.Target)
	switch {
	case err != nil:
		return err
	case published && have.Same(v):
		err := s.showVolume(ctx, v)
		if err == nil {
			err = s.listenForClient(ctx, v)
		}
		if err != nil {
			return fault.Errorf(fault.Unavailable, "the target is left unchanged: %w", err)
		}
		return nil
	}
	if err := errors.Join(refused, s.opts.Refused); err != nil {
		return err
	}
	if published {
		return fault.Errorf(fault.Exists, "target %s shows volume %s with other attributes (%s/%s)", v.Target, have.VolumeID, have.EmptyDir, have.Socket)
	}
	if err := s.checkTarget(ctx, v); err != nil {
		return err
	}
	if err := s.recordIfAllowed(ctx, v); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
			defer cancel()
			err = mount.WithCleanupError(err, s.removeVolume(cctx, v))
		}
	}()
	if err := s.showVolume(ctx, v); err != nil {
		return err
	}
	if err := s.awaitEmptyDir(ctx, v); err != nil {
		return err
	}
	if err := s.listenForClient(ctx, v); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Published, waiting for client in pod", "emptyDir", v.EmptyDir, "socket", v.Socket)
	return nil
}

// checkTarget refuses targets that are not kubelet's, or are not free.
func (s *Server) checkTarget(ctx context.Context, v podvolume.Volume) error {
	if _, _, ok := v.Pod(); !ok {
		return fault.Field("target_path",
			"%s is not a target of kubelet for an inline volume (<root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount)", v.Target)
	}
	if s.opts.TargetRoot != "" && !strings.HasPrefix(v.Target, s.opts.TargetRoot+"/") {
		return fault.Field("target_path", "%q is not below %s", v.Target, s.opts.TargetRoot)
	}
	if err := host.CheckTarget(s.opts.TargetRoot, v.Target); err != nil {
		return err
	}
	mounts, err := s.ns.Mounts(ctx)
	if err != nil {
		return err
	}
	if top, mounted := host.TopAt(mounts, v.Target); mounted {
		return errForeign(v.Target, top)
	}
	return nil
}

// recordIfAllowed writes the record of a volume if its pod may have it.
func (s *Server) recordIfAllowed(ctx context.Context, v podvolume.Volume) error {
	// kubelet publishes a pod's volumes at the same time. Targets, which are locked, too, have longer names.
	dir, _, _ := v.Pod()
	release, err := s.locks.Lock(ctx, dir)
	if err != nil {
		return fault.Errorf(fault.Busy, "another request for the pod is in flight: %w", err)
	}
	defer release()
	if err := s.checkOthers(ctx, v); err != nil {
		return err
	}
	return s.records.write(ctx, v)
}

// checkOthers refuses a volume of a pod that has too many, and a socket that another volume of the pod has: they would replace each other's,
// and a client would get either's descriptor. The caller holds the pod's lock.
func (s *Server) checkOthers(ctx context.Context, v podvolume.Volume) error {
	all, _ := s.records.all(ctx) // a record that cannot be read is one of another pod, or hides a use of the socket
	dir, _, _ := v.Pod()
	ofPod := 0
	for _, other := range all {
		if other.Target == v.Target {
			continue
		}
		if otherDir, _, _ := other.Pod(); otherDir == dir {
			ofPod++
		}
		if ofPod >= maxOfPod {
			return fault.Errorf(fault.Exhausted, "the pod has %d volumes with a client of its own already, which is the maximum", maxOfPod)
		}
		if other.Socket == v.Socket && other.SocketDir() == v.SocketDir() {
			return fault.Field("volume_context."+podvolume.AttributeSocket,
				"%q in emptyDir volume %q is the socket of the pod's volume %q: give each volume a socket of its own",
				v.Socket, v.EmptyDir, filepath.Base(filepath.Dir(other.Target)))
		}
	}
	return nil
}

func errForeign(target string, top host.Mount) error {
	return fault.Errorf(fault.Precondition, "target %s has a mount of another program or volume (%s, type %s): unmount it first", target, top.Source, top.FSType)
}

// awaitEmptyDir waits until kubelet has made the emptyDir volume, with the tmpfs of one with medium Memory.
func (s *Server) awaitEmptyDir(ctx context.Context, v podvolume.Volume) error {
	for began := time.Now(); ; {
		err := s.ns.Do(ctx, "looking for emptyDir volume "+v.EmptyDir, func() error { return emptyDirReady(s.opts.TargetRoot, v) })
		if err == nil || !fault.Is(err, fault.NotFound) {
			return err
		}
		if time.Since(began) >= emptyDirBound {
			return fault.Errorf(fault.Precondition, "volume_context.%s: the pod has no emptyDir volume %q, or kubelet has not made it within %s: %w",
				podvolume.AttributeEmptyDir, v.EmptyDir, emptyDirBound, err)
		}
		select {
		case <-time.After(emptyDirPause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Unpublish removes the volume from a target: it ends the client's connection, unmounts, and removes the socket and the target. ok is
// false if no volume of this kind is published there.
func (s *Server) Unpublish(ctx context.Context, volumeID, target string) (ok bool, err error) {
	target = s.opts.Resolve(target)
	release, err := s.locks.Lock(ctx, target)
	if err != nil {
		return true, fault.Errorf(fault.Busy, "another request for the target is in flight: %w", err)
	}
	defer release()
	v, published, err := s.records.get(ctx, target)
	switch {
	case err != nil:
		return true, err
	case !published:
		return false, nil
	case v.VolumeID != volumeID:
		return true, fault.Errorf(fault.Precondition, "target %s belongs to volume %s, not %s", target, v.VolumeID, volumeID)
	}
	if err := s.removeVolume(ctx, v); err != nil {
		return true, err
	}
	klog.FromContext(ctx).Info("Unpublished volume of a client in the pod")
	return true, nil
}

// Stats returns the usage that the client reports. It is fault.NotFound if the volume is not published at the path, and fault.Unavailable
// while no client serves it.
func (s *Server) Stats(ctx context.Context, volumeID, target string) (mount.Stats, error) {
	target = s.opts.Resolve(target)
	v, ok, err := s.records.get(ctx, target)
	if err != nil {
		return mount.Stats{}, err
	}
	if !ok || v.VolumeID != volumeID {
		return mount.Stats{}, fault.Errorf(fault.NotFound, "volume %s is not published at %s on this node", volumeID, target)
	}
	mounts, err := s.ns.Mounts(ctx)
	if err != nil {
		return mount.Stats{}, err
	}
	current, ok := s.records.current(mounts, idOf(target))
	if top, mounted := host.TopAt(mounts, target); !ok || !mounted || top.Minor != current.mount.Minor {
		return mount.Stats{}, fault.Errorf(fault.Unavailable, "volume %s at %s: no client of the pod serves it", volumeID, target)
	}
	ctx, cancel := context.WithTimeout(host.For(ctx, account(v)), statsBound)
	defer cancel()
	st, err := s.ns.Statfs(ctx, target)
	if err != nil {
		return mount.Stats{}, fault.Errorf(fault.Unavailable, "volume %s at %s: its client in the pod does not answer: %w", volumeID, target, err)
	}
	return mount.StatsOf(st), nil
}

// account is what calls that wait for the volume's client are accounted to: see host.For.
func account(v podvolume.Volume) string { return "mount " + sourceOf(idOf(v.Target)) }
