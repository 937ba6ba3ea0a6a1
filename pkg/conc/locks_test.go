package conc

import (
	"context"
	"errors"
	"sync"
	"testing"
)

func TestLocks_OneHolderPerName(t *testing.T) {
	var (
		locks Locks
		wg    sync.WaitGroup
		n     int
	)
	for range 50 {
		wg.Go(func() {
			release, err := locks.Lock(t.Context(), "a")
			if err != nil {
				t.Error(err)
				return
			}
			defer release()
			n++ // the race detector sees it if two hold the lock
		})
	}
	wg.Wait()
	if n != 50 {
		t.Errorf("%d holders, want 50", n)
	}
	if len(locks.names) != 0 {
		t.Errorf("%d names are kept", len(locks.names))
	}
}

func TestLocks_NamesAreIndependent(t *testing.T) {
	var locks Locks
	a, ok := locks.TryLock("a")
	if !ok {
		t.Fatal("a free name could not be locked")
	}
	if _, ok := locks.TryLock("a"); ok {
		t.Fatal("a held name was locked twice")
	}
	b, ok := locks.TryLock("b")
	if !ok {
		t.Fatal("another name could not be locked")
	}
	b()
	a()
	if _, ok := locks.TryLock("a"); !ok {
		t.Fatal("a released name could not be locked")
	}
}

func TestLocks_WaiterStopsWithItsContext(t *testing.T) {
	var locks Locks
	release, _ := locks.TryLock("a")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := locks.Lock(ctx, "a"); !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v, want the context's", err)
	}
	release()
	if len(locks.names) != 0 {
		t.Errorf("%d names are kept", len(locks.names))
	}
}
