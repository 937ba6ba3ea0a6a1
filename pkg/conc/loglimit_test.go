package conc

import (
	"strconv"
	"testing"
	"time"
)

func TestLimiter_RepeatedMessageIsLoggedOncePerInterval(t *testing.T) {
	const repeat = 10 * time.Minute
	l, now := LogLimiter{Repeat: repeat}, time.Now()
	for i, step := range []struct {
		after   time.Duration
		text    string
		want    bool
		dropped int
	}{
		{0, "draining: 3 uploads (for 61s)", true, 0}, {time.Minute, "draining: 2 uploads (for 121s)", false, 0}, {time.Minute, "no answer", true, 1},
		{time.Minute, "no answer", false, 0}, {time.Minute, "no answer", false, 0}, {repeat, "no answer", true, 2},
	} {
		now = now.Add(step.after)
		if ok, dropped := l.Allow("m", step.text, now); ok != step.want || dropped != step.dropped {
			t.Errorf("%d, %q: %t, %d", i, step.text, ok, dropped)
		}
	}
	if ok, _ := l.Allow("other", "no answer", now); !ok {
		t.Error("the message of another subject is not logged")
	}
}

func TestLimiter_MessagesOfAllSubjectsAreBounded(t *testing.T) {
	l, now := LogLimiter{Repeat: time.Minute, Burst: 10, PerSecond: 2}, time.Now()
	logged, dropped := 0, 0
	for i := range 10000 { // in ten seconds
		ok, n := l.Allow(strconv.Itoa(i), "x", now.Add(time.Duration(i)*time.Millisecond))
		if ok {
			logged++
			dropped += n
		}
	}
	if logged < 29 || logged > 31 || logged+dropped < 10000-1000 {
		t.Errorf("%d are logged and %d counted", logged, dropped)
	}
}
