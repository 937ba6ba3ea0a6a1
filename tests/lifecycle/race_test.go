package lifecycle_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// twoControllers are processes that share nothing but the server.
func twoControllers(t *testing.T) (*rigtest.Server, [2]connection) {
	t.Helper()
	s := rigtest.StartServer(t, s3server.Options{})
	var both [2]connection
	for i := range both {
		endpoint, _ := socket(t)
		p := launch(t, environment(s), "controller", "--endpoint="+endpoint)
		both[i] = dial(t, endpoint)
		p.ready(t, both[i])
	}
	return s, both
}

// insist calls as a CO does: again while the answer is that it may have happened.
func insist(ctx context.Context, call func() error) error {
	for {
		err := call()
		switch status.Code(err) {
		case codes.Aborted, codes.Unavailable:
			select {
			case <-ctx.Done():
				return err
			case <-time.After(20 * time.Millisecond):
			}
		default:
			return err
		}
	}
}

// race has both controllers, several times each, make the same volume, and returns what they made of it.
func race(ctx context.Context, both [2]connection, request func(controller int) *csi.CreateVolumeRequest) (ids []string, errs []error) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	start := make(chan struct{})
	for i := range 6 {
		wg.Go(func() {
			<-start
			var id string
			err := insist(ctx, func() error {
				resp, err := both[i%2].CreateVolume(ctx, request(i%2))
				id = resp.GetVolume().GetVolumeId()
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
			} else if !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		})
	}
	close(start)
	wg.Wait()
	return ids, errs
}

func TestTwoControllersThatRaceMakeOneVolume(t *testing.T) {
	t.Parallel()
	s, both := twoControllers(t)
	ctx := rigtest.Context(t, time.Minute)
	for round := range 8 {
		name := fmt.Sprintf("prefix-%d", round)
		ids, errs := race(ctx, both, func(int) *csi.CreateVolumeRequest { return rigtest.CreateRequest(name) })
		if len(ids) != 1 || len(errs) > 0 {
			t.Errorf("volume %s: ids %v, errors %v", name, ids, errs)
		}
		bucket := fmt.Sprintf("bucket-%d", round)
		ids, errs = race(ctx, both, func(int) *csi.CreateVolumeRequest {
			return &csi.CreateVolumeRequest{Name: bucket, VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()}}
		})
		if len(ids) != 1 || len(errs) > 0 {
			t.Errorf("volume %s: ids %v, errors %v", bucket, ids, errs)
		}
	}
	if got := s.Keys(t, rigtest.Bucket, ".s3-csi/volumes/"); len(got) != 8 {
		t.Errorf("records: %v, want 8", got)
	}
}

func TestOfTwoControllersWithOtherParametersOneWins(t *testing.T) {
	t.Parallel()
	_, both := twoControllers(t)
	ctx := rigtest.Context(t, time.Minute)
	for round := range 8 {
		name := fmt.Sprintf("vol-%d", round)
		ids, errs := race(ctx, both, func(controller int) *csi.CreateVolumeRequest {
			return rigtest.CreateRequest(name, "onDelete", []string{"delete", "retain"}[controller])
		})
		if len(ids) != 1 || len(errs) != 3 {
			t.Errorf("volume %s: ids %v and %d errors, want one id and the other controller's 3 errors", name, ids, len(errs))
		}
		for _, err := range errs {
			hasCode(t, err, codes.AlreadyExists, name)
		}
	}
}

func TestTwoControllersThatDeleteAndMakeAgainAgree(t *testing.T) {
	t.Parallel()
	s, both := twoControllers(t)
	ctx := rigtest.Context(t, time.Minute)
	v := rigtest.Create(t, both[0], "vol")
	for generation := 1; generation <= 4; generation++ {
		prefix := strings.TrimPrefix(v.GetVolumeId(), "default:"+rigtest.Bucket+"/")
		for i := range 30 {
			s.Put(t, rigtest.Bucket, fmt.Sprintf("%sdir/%d", prefix, i), "x")
		}
		s.Put(t, rigtest.Bucket, "neighbour/file", "precious")
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				if err := insist(ctx, func() error {
					_, err := both[i%2].DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
					return err
				}); err != nil {
					t.Errorf("generation %d: %v", generation, err)
				}
			})
		}
		wg.Wait()
		if left := s.Keys(t, rigtest.Bucket, prefix); len(left) > 0 {
			t.Errorf("generation %d: left: %v", generation, left)
		}
		old := v.GetVolumeId()
		ids, errs := race(ctx, both, func(int) *csi.CreateVolumeRequest { return rigtest.CreateRequest("vol") })
		if len(ids) != 1 || len(errs) > 0 {
			t.Fatalf("again: ids %v, errors %v", ids, errs)
		}
		if v = (&csi.Volume{VolumeId: ids[0]}); ids[0] == old {
			t.Errorf("the volume that came back has the deleted one's id %s", old)
		}
	}
	if got := s.Keys(t, rigtest.Bucket, "neighbour/"); len(got) != 1 {
		t.Error("the neighbour's data is gone")
	}
}
