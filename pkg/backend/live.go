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

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
)

const (
	// reloadInterval is how often the config file is read. It is polled because a ConfigMap is replaced behind symbolic links and
	// CA files may be elsewhere.
	reloadInterval = 10 * time.Second
	// settleTime is how long a new content must stay the same. Otherwise a file that is written in place could be read half
	// done, and half a config may be valid.
	settleTime = time.Second
)

// Configured is a config that may change, so get it for each use.
type Configured interface {
	// Config returns the current config.
	Config() *Config
	// Changed returns a channel that is closed when Config changes; nil: never.
	Changed() <-chan struct{}
}

// Live reloads the config file. An invalid file is ignored: the last valid config stays in use.
type Live struct {
	path, region, endpoint string
	interval               time.Duration

	current    atomic.Pointer[Config]
	mu         sync.Mutex
	changed    chan struct{}
	reloads    *prometheus.CounterVec
	successful prometheus.Gauge
}

// NewLive reads the config file like LoadConfig and returns its errors; path "" is the config without a file.
func NewLive(path, region, endpoint string) (*Live, error) {
	l := &Live{
		path: path, region: region, endpoint: endpoint, interval: reloadInterval, changed: make(chan struct{}),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_config_reloads_total",
			Help: "Reloads of a changed config file or CA file, by result: success or failure (the file is invalid).",
		}, []string{"result"}),
		successful: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "s3csi_config_last_reload_successful",
			Help: "Whether the current config file is in use: 1, or 0 if it is invalid and the last valid one is in use.",
		}),
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

// Changed implements Configured. Call it before Config, or a change may be missed.
func (l *Live) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// Backend returns the current backend of that name. An unknown name is a Precondition.
func (l *Live) Backend(name string) (Backend, error) { return l.Config().Backend(name) }

// Clients returns the current clients.
func (l *Live) Clients() client.Set { return l.Config().Clients() }

// Run reloads the file until ctx ends.
func (l *Live) Run(ctx context.Context) error {
	if l.path == "" {
		<-ctx.Done()
		return nil
	}
	refused := "" // why the current file is invalid
	for conc.Sleep(ctx, l.interval) {
		refused = l.reload(ctx, refused)
	}
	return nil
}

func (l *Live) load() (*Config, error) {
	if l.path == "" {
		return DefaultConfig(l.region, l.endpoint)
	}
	return LoadConfig(l.path, l.region, l.endpoint)
}

// reload reads the file, and a new content twice. It returns why the file is invalid, or "".
func (l *Live) reload(ctx context.Context, refused string) string {
	logger := klog.FromContext(ctx).WithValues("file", l.path)
	c, err := l.load()
	if err == nil && c.same(l.Config()) {
		if refused != "" {
			logger.Info("Config file is valid again and unchanged")
			l.successful.Set(1)
		}
		return ""
	}
	if !conc.Sleep(ctx, min(l.interval, settleTime)) {
		return refused
	}
	again, errAgain := l.load()
	switch {
	case err != nil && errAgain != nil && err.Error() == errAgain.Error():
		if err.Error() != refused {
			logger.Error(err, "Config file is invalid, keeping the last valid one")
			l.reloads.WithLabelValues(resultFailure).Inc()
			l.successful.Set(0)
		}
		return err.Error()
	case err == nil && errAgain == nil && c.same(again):
		l.apply(logger, again)
		return ""
	}
	return refused // it is being written: check again at the next interval
}

// apply makes a config the current one.
func (l *Live) apply(logger klog.Logger, c *Config) {
	old := l.current.Swap(c)
	added, removed, changed := c.since(old)
	logger.Info("Config file reloaded", "added", added, "removed", removed, "changed", changed, "clientsChanged", c.declared != old.declared)
	l.reloads.WithLabelValues(resultSuccess).Inc()
	l.successful.Set(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
}

// same reports whether two configs are equal.
func (c *Config) same(other *Config) bool {
	return c.declared == other.declared && maps.Equal(c.revisions(), other.revisions())
}

func (c *Config) revisions() map[string]string {
	all := make(map[string]string, len(c.backends))
	for name, b := range c.backends {
		all[name] = b.Revision()
	}
	return all
}

// since returns the names of backends that were added, removed and changed since an older config.
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
