package controller

import (
	"context"
	"sync"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

// sessions is pkg/session, and remembers what it made.
type sessions struct {
	*session.Planner
	maker *session.Maker

	mu   sync.Mutex
	keys []credentials.Keys
}

// Make implements identity.Sessions.
func (s *sessions) Make(ctx context.Context, o credentials.Order) (credentials.Keys, error) {
	keys, err := s.maker.Make(ctx, o)
	if err == nil {
		canaries.add(keys)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.keys = append(s.keys, keys)
	}
	return keys, err
}

// made are the sessions so far.
func (s *sessions) made() []credentials.Keys {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]credentials.Keys{}, s.keys...)
}
