// Package usage measures the usage of the volumes that ask for it and that are published on this node, by listing them: a bounded listing,
// at most once per interval. It enforces nothing.
//
// A measurement has a session of its own, which is made from what a publication brings. Secrets and tokens are kept until the measurement
// that a publication started has ended, and no longer; the next publication brings them again. How often a volume is measured, and its
// size, are read from the volume's record.
package usage

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// parallel is how many volumes are measured at a time.
	parallel = 2
	// listBound bounds a listing, visitBound a measurement with everything before it.
	listBound  = 5 * time.Minute
	visitBound = listBound + 2*time.Minute
	// readEvery is how often a volume's record is read at most: a change takes effect within that time.
	readEvery = time.Hour
	// retryAfter is when a failed measurement is tried again for the first time. The shortest interval is not shorter.
	retryAfter = volume.MinUsage
	// pruneEvery is how often volumes without a publication are looked for.
	pruneEvery = time.Minute
	// storeBound bounds reading and writing the records of usage.
	storeBound = 10 * time.Second
)

// Store keeps records of usage. state.usages implements it.
type Store interface {
	All(ctx context.Context) ([]state.Usage, error)
	Write(ctx context.Context, u state.Usage) error
	Remove(ctx context.Context, volumeID string) error
}

// Publications are those of the node.
type Publications interface {
	All(ctx context.Context) ([]state.Publication, error)
}

// Backends are the S3 services.
type Backends interface {
	Backend(name string) (backend.Backend, error)
	With(ctx context.Context, be backend.Backend, a backend.Access, do func(context.Context, *s3.Client) error) (backend.BucketInfo, error)
}

// Sessions makes sessions for measurements. *creds.Provider implements it.
type Sessions interface {
	UsageKeys(ctx context.Context, r mount.Request, spec mount.Spec, record mount.RecordPlace) (credentials.Keys, error)
}

// Options are the parts and settings of a Meter.
type Options struct {
	Store        Store
	Publications Publications
	Backends     Backends
	Sessions     Sessions
	MaxRequests  int // of one listing; 0: nothing is measured
	Now          func() time.Time
}

// Meter measures the usage of volumes. All methods may be called concurrently.
type Meter struct {
	options Options
	metrics metrics
	wake    chan struct{}
	slots   chan struct{}

	mu      sync.Mutex
	entries map[string]*entry // by volume id
	seen    uint64            // publications so far
}

// entry is a volume.
type entry struct {
	usage     state.Usage
	published bool
	seen      uint64  // the number of its last publication
	busy      bool    // it is being measured
	source    *source // nil: the next publication brings it
}

// source is what a measurement needs of a publication.
type source struct {
	request mount.Request
	spec    mount.Spec
}

// lasting reports whether the source can be kept: it has no secrets.
func (s *source) lasting() bool { return s != nil && s.spec.Source == credentials.SourceDriver }

// New returns a meter that continues where the driver before it ended. It starts nothing.
func New(ctx context.Context, o Options) (*Meter, error) {
	m := &Meter{options: o, metrics: newMetrics(), wake: make(chan struct{}, 1), slots: make(chan struct{}, parallel), entries: map[string]*entry{}}
	if o.MaxRequests == 0 {
		return m, nil
	}
	all, err := o.Store.All(ctx)
	for _, u := range all {
		m.entries[u.VolumeID] = &entry{usage: u}
	}
	return m, err
}

// Observe notes a successful publication. It starts a measurement if one is due.
func (m *Meter) Observe(r mount.Request, spec mount.Spec) {
	if r.Attributes.Usage == 0 || m.options.MaxRequests == 0 {
		return
	}
	m.mu.Lock()
	e := m.entries[r.VolumeID]
	if e == nil {
		e = &entry{usage: state.Usage{VolumeID: r.VolumeID, Setting: r.Attributes.Usage}}
		m.entries[r.VolumeID] = e
	}
	m.seen++
	e.published, e.seen = true, m.seen
	due := !e.busy && !e.due().After(m.options.Now())
	if s := (&source{r, spec}); due || s.lasting() {
		e.source = s
	}
	m.mu.Unlock()
	if due {
		m.poke()
	}
}

// Of returns the last measurement of a volume; ok is false if there is none, or its listing was cut.
func (m *Meter) Of(volumeID string) (u mount.Usage, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.entries[volumeID]
	if e == nil || !e.shown() || e.usage.AtLeast {
		return mount.Usage{}, false
	}
	return mount.Usage{Bytes: e.usage.Bytes, Objects: e.usage.Objects, CapacityBytes: e.usage.CapacityBytes}, true
}

// shown reports whether there is a measurement to show.
func (e *entry) shown() bool {
	return e.published && !e.usage.Measured.IsZero() && e.usage.Setting.Interval() != 0
}

// due returns when a volume has to be visited next: to read its record, or to list it.
func (e *entry) due() time.Time {
	at := e.usage.Read.Add(readEvery)
	if e.usage.Setting.Interval() != 0 && e.usage.NotBefore.Before(at) {
		at = e.usage.NotBefore
	}
	return later(at, e.usage.Retry)
}

// expires returns when nothing has to be known any more of a volume without a publication.
func (e *entry) expires() time.Time {
	return later(later(e.usage.Read.Add(readEvery), e.usage.NotBefore), e.usage.Retry)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (m *Meter) poke() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Run measures volumes until ctx ends.
func (m *Meter) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ticker := time.NewTicker(pruneEvery)
	defer ticker.Stop()
	for {
		if err := m.prune(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Cannot read publications, measuring no usage")
		} else {
			for _, e := range m.next() {
				wg.Go(func() { m.visit(ctx, e) })
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		case <-ticker.C:
		}
	}
}

// prune forgets volumes without a publication: their sources at once, their measurements when they may be listed again.
func (m *Meter) prune(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, storeBound)
	defer cancel()
	m.mu.Lock()
	none, seen := len(m.entries) == 0, m.seen
	m.mu.Unlock()
	if none {
		return nil
	}
	all, err := m.options.Publications.All(ctx)
	if err != nil {
		return err
	}
	published := map[string]bool{}
	for _, p := range all {
		published[p.VolumeID] = true
	}
	var gone []string
	m.mu.Lock()
	for id, e := range m.entries {
		if e.seen > seen { // published since
			continue
		}
		e.published = published[id]
		if e.published || e.busy {
			continue
		}
		e.source = nil
		if e.expires().Before(m.options.Now()) {
			delete(m.entries, id)
			gone = append(gone, id)
		}
	}
	m.mu.Unlock()
	for _, id := range gone {
		err = errors.Join(err, m.options.Store.Remove(ctx, id))
	}
	return err
}

// next returns the volumes to visit now, and marks them.
func (m *Meter) next() (due []*entry) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.entries {
		if e.published && !e.busy && e.source != nil && !e.due().After(m.options.Now()) {
			e.busy = true
			due = append(due, e)
		}
	}
	return due
}

// visit reads the settings of a volume and lists it if that is due:
//
//  1. record that it is tried, so that a driver that is killed meanwhile does not list the volume again at once
//  2. make a session, read the settings if that is due
//  3. list the volume if it is measured, and has not been within its interval
//  4. record what was found, or when to try again
func (m *Meter) visit(ctx context.Context, e *entry) {
	select {
	case m.slots <- struct{}{}:
		defer func() { <-m.slots }()
	case <-ctx.Done():
		return
	}
	began := m.options.Now()
	m.mu.Lock()
	u, s, published := e.usage, *e.source, e.published
	m.mu.Unlock()
	if !published { // while it waited for the others
		m.finish(e, u)
		return
	}
	logger := klog.FromContext(ctx).WithValues("volume", u.VolumeID)
	vctx, cancel := context.WithTimeout(ctx, visitBound)
	defer cancel()
	tried := u
	tried.Failures++
	tried.Retry = began.Add(backoff(tried.Failures))
	err := m.options.Store.Write(vctx, tried)
	if err == nil {
		var result string
		if u, result, err = m.measure(vctx, u, s, began); result != "" {
			m.metrics.measurements.WithLabelValues(result).Inc()
			logger.Info("Measured usage", "result", result, "bytes", u.Bytes, "objects", u.Objects, "took", m.options.Now().Sub(began))
		}
	}
	if ctx.Err() != nil { // the driver stops, and the next one tries again
		m.finish(e, tried)
		return
	}
	if err != nil {
		m.metrics.measurements.WithLabelValues(resultFailed).Inc()
		u.Failures, u.Retry = tried.Failures, tried.Retry
		logger.Error(err, "Cannot measure usage, will retry", "notBefore", u.Retry)
	}
	m.finish(e, u)
	wctx, cancelWrite := context.WithTimeout(ctx, storeBound)
	defer cancelWrite()
	if err := m.options.Store.Write(wctx, u); err != nil {
		logger.Error(err, "Cannot record usage")
	}
}

// backoff returns the pause after a number of failures.
func backoff(failures int) time.Duration { return min(retryAfter<<min(failures-1, 6), 6*time.Hour) }

// finish ends a visit.
func (m *Meter) finish(e *entry, u state.Usage) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.usage, e.busy = u, false
	if !e.source.lasting() {
		e.source = nil
	}
}

// measure returns the usage of a volume as it is afterwards. result is "" if it was not listed.
func (m *Meter) measure(ctx context.Context, u state.Usage, s source, began time.Time) (_ state.Usage, result string, err error) {
	id, parseErr := volume.ParseID(u.VolumeID)
	recorded := parseErr == nil
	place := mount.RecordPlace{Tags: recorded && id.Prefix == ""}
	if segment, _, ok := id.NameSegment(); recorded && ok {
		place.Key = records.Key(segment)
	}
	be, err := m.options.Backends.Backend(s.spec.Backend)
	if err != nil {
		return u, "", err
	}
	options, err := s.spec.ParseOptions()
	if err != nil {
		return u, "", err
	}
	be = be.For(options)
	keys, err := m.options.Sessions.UsageKeys(ctx, s.request, s.spec, place)
	if err != nil {
		return u, "", err
	}
	access := backend.Access{Keys: keys, Bucket: backend.BucketInfo{Name: s.spec.Bucket, Region: s.spec.Region, Owner: s.spec.ExpectedBucketOwner}}
	if began.Sub(u.Read) >= readEvery {
		found := records.Settings{Usage: s.request.Attributes.Usage}
		if recorded {
			var read records.Settings
			access.Bucket, err = m.options.Backends.With(ctx, be, access, func(ctx context.Context, client *s3.Client) (err error) {
				read, err = records.ReadSettings(ctx, client, id)
				return err
			})
			switch {
			case err == nil:
				found = read
			case fault.Is(err, fault.NotFound), fault.Is(err, fault.Denied), fault.Is(err, fault.Precondition):
				// The volume context has the interval as of the creation, and nothing has the size.
				klog.FromContext(ctx).V(4).Info("Volume place is not readable", "volume", u.VolumeID, "reason", err.Error())
			default:
				return u, "", err
			}
		}
		if found.Usage != u.Setting && found.Usage.Interval() != 0 && !u.Measured.IsZero() {
			u.NotBefore = u.Measured.Add(found.Usage.Interval())
		}
		u.Setting, u.CapacityBytes, u.Read = found.Usage, found.CapacityBytes, began
	}
	interval := u.Setting.Interval()
	if interval == 0 || u.NotBefore.After(began) {
		u.Failures, u.Retry = 0, time.Time{}
		return u, "", nil
	}
	var c backend.Count
	except := ""
	if s.spec.Prefix == "" {
		except = volume.RecordPrefix + "/"
	}
	lctx, cancel := context.WithTimeout(ctx, listBound)
	defer cancel()
	_, err = m.options.Backends.With(lctx, be, access, func(ctx context.Context, client *s3.Client) (err error) {
		c, err = backend.CountObjects(ctx, client, backend.Listing{Bucket: s.spec.Bucket, Prefix: s.spec.Prefix, Except: except, MaxPages: m.options.MaxRequests})
		return err
	})
	m.metrics.requests.Add(float64(c.Pages))
	if err != nil {
		return u, "", backend.Classify(err, "listing "+s.spec.Bucket+"/"+s.spec.Prefix+" of "+be.String())
	}
	result = resultComplete
	if c.Cut {
		result = resultCut
	}
	u.Measured, u.Bytes, u.Objects, u.AtLeast, u.Failures, u.Retry = began, c.Bytes, c.Objects, c.Cut, 0, time.Time{}
	// Nodes that publish a volume at the same time do not list it at the same time again and again.
	u.NotBefore = began.Add(interval + rand.N(interval/10)) //nolint:gosec // nothing secret
	return u, result, nil
}
