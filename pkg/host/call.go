package host

import (
	"context"
	"sync"
)

// Call is Namespace.Do for a function with a result. If ctx ends first, Call returns the zero value, and passes a later result to
// drop unless that is nil.
func Call[T any](ctx context.Context, ns *Namespace, what string, drop func(T), fn func() (T, error)) (T, error) {
	var (
		mu        sync.Mutex
		made      []T
		abandoned bool
		none      T
	)
	err := ns.Do(ctx, what, func() error {
		v, err := fn()
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if abandoned {
			if drop != nil {
				drop(v)
			}
		} else {
			made = append(made, v)
		}
		return nil
	})
	mu.Lock()
	defer mu.Unlock()
	if err == nil {
		return made[0], nil
	}
	abandoned = true
	if drop != nil {
		for _, v := range made {
			drop(v)
		}
	}
	return none, err
}
