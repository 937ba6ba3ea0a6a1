// Package identitytest is a token service and a config for tests of what works with sessions.
package identitytest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

// Lab returns a config with one backend, lab, that has these settings, as "a: b, c: d".
func Lab(t testing.TB, settings string) (*backend.Config, backend.Backend) {
	t.Helper()
	config, err := backend.ParseConfig([]byte("backends:\n  lab: {"+settings+"}\n"), "", "")
	if err != nil {
		t.Fatal(err)
	}
	be, err := config.Backend("lab")
	if err != nil {
		t.Fatal(err)
	}
	return config, be
}

// Sessions implements identity.Sessions: it plans as the real one does, for keys of users, and makes sessions of an hour. It is not
// for concurrent use.
type Sessions struct {
	Now    func() time.Time
	Made   []credentials.Order
	Refuse error // of Make
}

// Plan implements identity.Sessions.
func (*Sessions) Plan(ctx context.Context, r session.Request) (credentials.Order, error) {
	return session.NewPlanner(ownKeys{}).Plan(ctx, r)
}

// Make implements identity.Sessions. The n-th session has the access key id SESSIONn.
func (s *Sessions) Make(_ context.Context, o credentials.Order) (credentials.Keys, error) {
	if s.Refuse != nil {
		return credentials.Keys{}, s.Refuse
	}
	s.Made = append(s.Made, o)
	return credentials.Keys{AccessKeyID: fmt.Sprint("SESSION", len(s.Made)), SecretAccessKey: "s", SessionToken: "t", Expires: s.Now().Add(time.Hour)}, nil
}

// ownKeys are what the driver's process itself has.
type ownKeys struct{}

func (ownKeys) DriverKeys(context.Context) (credentials.Keys, error) {
	return credentials.Keys{AccessKeyID: "DRIVER", SecretAccessKey: "s"}, nil
}

func (ownKeys) STSService(context.Context, backend.Backend) (credentials.STSService, error) {
	return credentials.STSService{Region: "us-east-1"}, nil
}
