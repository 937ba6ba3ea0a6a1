package mount

import (
	"context"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

const (
	// A client that lived for so long before it died is started again at once; each death after a shorter life, and each
	// failure to start, doubles the pause.
	goodLife  = 10 * time.Minute
	firstWait = time.Second
	maxWait   = 2 * time.Minute
)

// troubles remembers how often mounts' clients died lately. What is forgotten with the driver costs one try.
type troubles struct {
	mu  sync.Mutex
	now func() time.Time
	of  map[string]trouble
}

type trouble struct {
	tries int       // since the last good life
	last  time.Time // when it was last started again, or that failed
	why   cause     // of a death that nothing has come back from yet
}

// wait is how long to wait before a mount's client is started again.
func (t *troubles) wait(name string) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	tr, ok := t.of[name]
	if !ok || t.now().Sub(tr.last) >= goodLife {
		return 0
	}
	pause := firstWait
	for i := 1; i < tr.tries && pause < maxWait; i++ {
		pause *= 2
	}
	return max(0, min(pause, maxWait)-t.now().Sub(tr.last))
}

func (t *troubles) count(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tr := t.of[name]
	if t.now().Sub(tr.last) >= goodLife {
		tr.tries = 0
	}
	if t.of == nil {
		t.of = map[string]trouble{}
	}
	t.of[name] = trouble{tr.tries + 1, t.now(), tr.why}
}

// died notes of what a client died, and gives what it is put down to: until one serves again, those that could not be
// started do not hide what ended the one before them.
func (t *troubles) died(name string, why cause) cause {
	t.mu.Lock()
	defer t.mu.Unlock()
	tr := t.of[name]
	if tr.why.reason == "" || why.reason == reasonOOM {
		tr.why = why
	}
	if t.of == nil {
		t.of = map[string]trouble{}
	}
	t.of[name] = tr
	return tr.why
}

// failed notes that a client could not be started again, mended that it was.
func (t *troubles) failed(name string) { t.count(name) }

func (t *troubles) mended(name string) {
	t.count(name)
	t.mu.Lock()
	defer t.mu.Unlock()
	tr := t.of[name]
	tr.why = cause{}
	t.of[name] = tr
}

func (t *troubles) forget(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.of, name)
}

// complainAgain is how often an error that stays the same is logged.
const complainAgain = 10 * time.Minute

// complaints keeps errors that come back with every look from filling the log.
type complaints struct {
	mu   sync.Mutex
	said map[string]complaint
}

type complaint struct {
	text string
	when time.Time
}

// log logs an error about a subject, unless it said the same a moment ago. Numbers do not count: how long something has been
// going on, and how much is left of it, is another each time.
func (c *complaints) log(ctx context.Context, subject string, err error, message string, kv ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for s, old := range c.said { // few, and gone after a while
		if now.Sub(old.when) >= complainAgain {
			delete(c.said, s)
		}
	}
	text := strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, err.Error())
	if c.said[subject].text == text {
		return
	}
	if c.said == nil {
		c.said = map[string]complaint{}
	}
	c.said[subject] = complaint{text, now}
	klog.FromContext(ctx).Error(err, message, kv...)
}
