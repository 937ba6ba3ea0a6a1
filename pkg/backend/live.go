package backend

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

const (
	// lookInterval is how often the config file is read again. It is read as a whole: a ConfigMap is replaced behind symbolic
	// links, and CA files have their own.
	lookInterval = 10 * time.Second
	// settleTime is how long a new content must stay the same: a file that is written in place is read half done otherwise,
	// and half a config may be a good one.
	settleTime = time.Second
)

// Configured is a config that may be replaced by another: ask at each use.
type Configured interface {
	// Config is the current one.
	Config() *Config
	// Changed is closed when Config is not what it is now any more; nil: never.
	Changed() <-chan struct{}
}

// Live is the config file over time. What is in force is always a good config: a file that becomes unusable changes nothing
// until it is usable again.
type Live struct {
	path, region, endpoint string
	interval               time.Duration

	current    atomic.Pointer[Config]
	mu         sync.Mutex
	changed    chan struct{}
	reloads    *prometheus.CounterVec
	successful prometheus.Gauge
}

// LiveOption changes how Live works.
type LiveOption func(*Live)

// WithInterval sets how often the file is read.
func WithInterval(d time.Duration) LiveOption { return func(l *Live) { l.interval = d } }

// NewLive reads the config file as LoadConfig does; path "" is the config without a file. An error is that of LoadConfig: what
// is not usable at start is not started with.
func NewLive(path, region, endpoint string, opts ...LiveOption) (*Live, error) {
	l := &Live{
		path: path, region: region, endpoint: endpoint, interval: lookInterval, changed: make(chan struct{}),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_config_reloads_total",
			Help: "Contents of the config file and its CA files that were new since the start: taken over (success), or refused because they cannot be used (failure).",
		}, []string{"result"}),
		successful: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "s3csi_config_last_reload_successful",
			Help: "1 if the driver works with the config file as it is now, 0 if that cannot be used and an older one is in force.",
		}),
	}
	for _, opt := range opts {
		opt(l)
	}
	c, err := l.load()
	if err != nil {
		return nil, err
	}
	l.current.Store(c)
	l.successful.Set(1)
	for _, result := range []string{resultSuccess, resultFailure} {
		l.reloads.WithLabelValues(result)
	}
	return l, nil
}

// Values of the label result.
const (
	resultSuccess = "success"
	resultFailure = "failure"
)

// Register adds the metrics of the config file.
func (l *Live) Register(r prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{l.reloads, l.successful} {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}

// Config implements Configured.
func (l *Live) Config() *Config { return l.current.Load() }

// Changed implements Configured. Whoever waits for it asks for it first and for Config then, or may miss a change.
func (l *Live) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// Backend gives the backend of that name as it is configured now. A name that the config does not have is a Precondition.
func (l *Live) Backend(name string) (Backend, error) { return l.Config().Backend(name) }

// Run looks at the file until ctx ends.
func (l *Live) Run(ctx context.Context) error {
	if l.path == "" {
		<-ctx.Done()
		return nil
	}
	refused := "" // why, while the file as it is cannot be used
	for wait(ctx, l.interval) {
		refused = l.look(ctx, refused)
	}
	return nil
}

func (l *Live) load() (*Config, error) {
	if l.path == "" {
		return DefaultConfig(l.region, l.endpoint)
	}
	return LoadConfig(l.path, l.region, l.endpoint)
}

// look reads the file once, and a new content twice. It tells why the file cannot be used; "" is no reason.
func (l *Live) look(ctx context.Context, refused string) string {
	logger := klog.FromContext(ctx).WithValues("file", l.path)
	c, err := l.load()
	if err == nil && c.same(l.Config()) {
		if refused != "" {
			logger.Info("The config file is again as it was when it could be used last")
			l.successful.Set(1)
		}
		return ""
	}
	if !wait(ctx, min(l.interval, settleTime)) {
		return refused
	}
	again, errAgain := l.load()
	switch {
	case err != nil && errAgain != nil && err.Error() == errAgain.Error():
		if err.Error() != refused {
			logger.Error(err, "The config file cannot be used any more; the last one that could stays in force until it is corrected")
			l.reloads.WithLabelValues(resultFailure).Inc()
			l.successful.Set(0)
		}
		return err.Error()
	case err == nil && errAgain == nil && c.same(again):
		l.take(logger, again)
		return ""
	}
	return refused // it is being written: the next look sees more
}

// take puts a config in force.
func (l *Live) take(logger klog.Logger, c *Config) {
	old := l.current.Swap(c)
	added, removed, changed := c.since(old)
	logger.Info("The config file changed and is in force", "added", added, "removed", removed, "changed", changed)
	l.reloads.WithLabelValues(resultSuccess).Inc()
	l.successful.Set(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
}

// same tells whether two configs say the same.
func (c *Config) same(other *Config) bool {
	return maps.Equal(c.revisions(), other.revisions())
}

func (c *Config) revisions() map[string]string {
	all := make(map[string]string, len(c.backends))
	for name, b := range c.backends {
		all[name] = b.Revision()
	}
	return all
}

// since compares with an older config: the names of backends that are new, gone and different.
func (c *Config) since(old *Config) (added, removed, changed []string) {
	now, before := c.revisions(), old.revisions()
	for _, name := range slices.Sorted(maps.Keys(now)) {
		switch revision, ok := before[name]; {
		case !ok:
			added = append(added, name)
		case revision != now[name]:
			changed = append(changed, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if _, ok := now[name]; !ok {
			removed = append(removed, name)
		}
	}
	return added, removed, changed
}

// wait tells whether d passed before ctx ended.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
