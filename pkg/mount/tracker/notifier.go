package tracker

import "sync"

// notifier wakes the goroutines that wait for a change.
type notifier struct {
	mu sync.Mutex
	ch chan struct{}
}

// changed returns a channel that is closed by the next notify.
func (n *notifier) changed() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

func (n *notifier) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
		n.ch = nil
	}
}
