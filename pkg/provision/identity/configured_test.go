package identity

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// changing is a config that a test replaces.
type changing struct {
	mu      sync.Mutex
	current *backend.Config
	changed chan struct{}
}

func parse(t *testing.T, text string) *backend.Config {
	t.Helper()
	c, err := backend.ParseConfig([]byte(text), "", "")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *changing) Config() *backend.Config {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current
}

func (c *changing) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

func (c *changing) set(config *backend.Config) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current = config
	close(c.changed)
	c.changed = make(chan struct{})
}

const (
	atOne    = "backends: {b: {endpoint: 'http://127.0.0.1:1'}}"
	atTwo    = "backends: {b: {endpoint: 'http://127.0.0.1:2'}}"
	withMore = "backends: {b: {endpoint: 'http://127.0.0.1:1'}, more: {}}"
)

func TestWhileConfigured_WorkEndsWhenItsBackendMoves(t *testing.T) {
	for name, c := range map[string]struct {
		to   string
		kind fault.Kind // Unknown: none
	}{
		"moved":                {atTwo, fault.Busy},
		"gone":                 {"", fault.Busy},
		"another one is added": {withMore, fault.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			configs := &changing{current: parse(t, atOne), changed: make(chan struct{})}
			r := &Identities{config: configs}
			be, err := configs.Config().Backend("b")
			if err != nil {
				t.Fatal(err)
			}
			err = r.WhileConfigured(t.Context(), be, func(ctx context.Context) error {
				configs.set(parse(t, c.to))
				if c.kind != fault.Unknown {
					<-ctx.Done() // a deletion at a service that does not answer any more waits forever
					if !errors.Is(context.Cause(ctx), errReconfigured) {
						t.Errorf("the work ended because of %v", context.Cause(ctx))
					}
				}
				return ctx.Err()
			})
			if fault.KindOf(err) != c.kind || (err == nil) != (c.kind == fault.Unknown) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// A volume that is not to be found at the old endpoint may well be at the new one.
func TestWhileConfigured_SuccessAtTheOldEndpointIsBusy(t *testing.T) {
	configs := &changing{current: parse(t, atOne), changed: make(chan struct{})}
	r := &Identities{config: configs}
	be, err := configs.Config().Backend("b")
	if err != nil {
		t.Fatal(err)
	}
	err = r.WhileConfigured(t.Context(), be, func(context.Context) error {
		configs.set(parse(t, atTwo))
		return nil
	})
	if !fault.Is(err, fault.Busy) {
		t.Errorf("got %v", err)
	}
	// The config may have changed before the work's turn came.
	err = r.WhileConfigured(t.Context(), be, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	if !fault.Is(err, fault.Busy) {
		t.Errorf("work that begins with an old config: %v", err)
	}
}

func TestWhileConfigured_KeepsTheErrorOfTheWork(t *testing.T) {
	r := &Identities{config: parse(t, atOne)}
	be, err := r.config.Config().Backend("b")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if err := r.WhileConfigured(ctx, be, func(ctx context.Context) error { cancel(); <-ctx.Done(); return ctx.Err() }); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	want := errors.New("failed")
	if err := r.WhileConfigured(t.Context(), be, func(context.Context) error { return want }); !errors.Is(err, want) {
		t.Errorf("got %v", err)
	}
}
