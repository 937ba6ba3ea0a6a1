package identity

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

var testTime = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sts is a service that makes sessions of a length, and refuses on request.
type sts struct {
	now    time.Time
	length time.Duration // 0: forever
	refuse error
	made   int
}

func (s *sts) make(context.Context) (credentials.Keys, error) {
	if s.refuse != nil {
		return credentials.Keys{}, s.refuse
	}
	s.made++
	keys := credentials.Keys{AccessKeyID: fmt.Sprint("KEY", s.made), SecretAccessKey: "s", SessionToken: "t"}
	if s.length > 0 {
		keys.Expires = s.now.Add(s.length)
	}
	return keys, nil
}

func (s *sts) session() *Session {
	return (&Identities{now: func() time.Time { return s.now }}).NewSession("a test", s.make)
}

func wantKey(t *testing.T, session *Session, want string) {
	t.Helper()
	if keys, err := session.Keys(t.Context()); err != nil || keys.AccessKeyID != want {
		t.Errorf("%v, %v; want %s", keys, err, want)
	}
}

func TestASessionIsRenewedAheadOfItsEnd(t *testing.T) {
	for length, margin := range map[time.Duration]time.Duration{time.Hour: renewalMargin, 10 * time.Second: 2 * time.Second} {
		s := &sts{now: testTime, length: length}
		session := s.session()
		wantKey(t, session, "KEY1")
		s.now = testTime.Add(length - margin - time.Millisecond)
		wantKey(t, session, "KEY1")
		s.now = testTime.Add(length - margin)
		wantKey(t, session, "KEY2")
	}
	s := &sts{now: testTime}
	session := s.session()
	wantKey(t, session, "KEY1")
	s.now = testTime.Add(1000 * time.Hour)
	wantKey(t, session, "KEY1") // it has no end
}

func TestASessionServesWhileTheServiceMakesNoOther(t *testing.T) {
	s := &sts{now: testTime, length: time.Hour}
	session := s.session()
	wantKey(t, session, "KEY1")
	s.refuse = fault.Errorf(fault.Unavailable, "down")
	s.now = testTime.Add(time.Hour - time.Minute)
	wantKey(t, session, "KEY1")
	s.refuse = nil
	wantKey(t, session, "KEY1") // it was tried a moment ago
	s.now = s.now.Add(renewalPause)
	wantKey(t, session, "KEY2")

	s.refuse = fault.Errorf(fault.Denied, "no more")
	s.now = s.now.Add(time.Hour)
	if keys, err := session.Keys(t.Context()); !fault.Is(err, fault.Denied) || !keys.IsZero() {
		t.Errorf("after its end: %v, %v", keys, err)
	}
}

func TestASessionThatIsNotTakenAnyMoreIsNotGivenAgain(t *testing.T) {
	s := &sts{now: testTime, length: time.Hour}
	session := s.session()
	wantKey(t, session, "KEY1")
	session.drop("KEY0") // another one than the present
	wantKey(t, session, "KEY1")
	session.drop("KEY1")
	wantKey(t, session, "KEY2")
}

func TestOneSessionIsMadeForAllWhoWait(t *testing.T) {
	s := &sts{now: testTime, length: time.Hour}
	begun, goOn := make(chan struct{}), make(chan struct{})
	session := (&Identities{now: func() time.Time { return testTime }}).NewSession("a test", func(ctx context.Context) (credentials.Keys, error) {
		close(begun)
		<-goOn
		return s.make(ctx)
	})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { wantKey(t, session, "KEY1") })
	}
	<-begun
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := session.Keys(impatient); !fault.Is(err, fault.Timeout) || !errors.Is(err, context.Canceled) {
		t.Errorf("who does not wait gets %v", err)
	}
	close(goOn)
	wg.Wait()
}
