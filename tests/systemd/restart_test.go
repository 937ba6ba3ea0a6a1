package systemd_test

import (
	"os"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

const (
	systemBus = "/run/dbus/system_bus_socket"
	private   = "/run/systemd/private"
	booted    = "/run/systemd/system" // says that the host was booted with systemd (sd_booted(3))
)

// TestUnitsOutliveRestarts starts and lists units all the time while systemd, or the bus, is restarted below them.
func TestUnitsOutliveRestarts(t *testing.T) {
	for what, c := range map[string]struct {
		sockets []string
		restart []string
	}{
		"systemd, by the bus":       {[]string{systemBus}, []string{"daemon-reexec"}},
		"systemd, by its socket":    {[]string{private}, []string{"daemon-reexec"}},
		"the bus":                   {[]string{systemBus}, []string{"restart", "dbus.service"}},
		"the bus, with another way": {[]string{systemBus, private}, []string{"restart", "dbus.service"}},
	} {
		t.Run(what, func(t *testing.T) {
			l := newLauncher(t, launcher.Options{Sockets: c.sockets})
			old := start(t, l)
			s := old.run("wait:/nowhere")
			done := make(chan struct{})
			var wg sync.WaitGroup
			var fresh []*unit
			for range 4 {
				u := prepare(t, l)
				fresh = append(fresh, u)
				wg.Go(func() {
					for n := 0; ; n++ {
						if err := u.launch(bounded(t)); err != nil {
							t.Error(err)
							return
						}
						if _, err := l.List(bounded(t)); err != nil {
							t.Error(err)
						}
						select {
						case <-done:
							return
						default:
						}
						if err := l.Kill(bounded(t), u.UID); err != nil {
							t.Error(err)
						}
					}
				})
			}
			for range 3 {
				time.Sleep(200 * time.Millisecond)
				systemctl(t, "reset-failed", "dbus.service") // more restarts than its unit allows
				systemctl(t, c.restart...)
			}
			time.Sleep(200 * time.Millisecond)
			close(done)
			wg.Wait()
			if again := old.hello(); again.PID != s.PID || again.ClientPID != s.ClientPID {
				t.Errorf("it was %+v, it is %+v", s, again)
			}
			if state := show(t, old.name(), "ActiveState"); state != "active" {
				t.Errorf("the old unit is %s", state)
			}
			for _, u := range fresh {
				u.hello()
			}
			if list, err := l.List(bounded(t)); err != nil || len(list) != 1+len(fresh) {
				t.Errorf("the list: %+v %v", list, err)
			}
		})
	}
}

func TestWithoutABusSystemdItselfIsCalled(t *testing.T) {
	l := newLauncher(t, launcher.Options{})
	if err := os.Rename(systemBus, systemBus+".gone"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := os.Rename(systemBus+".gone", systemBus); err != nil {
			t.Error(err)
		}
	}()
	start(t, l).hello()
	// It has booted, so it is waited for: a systemd that executes itself again has no socket for a moment.
	if _, err := newLauncher(t, launcher.Options{Sockets: []string{systemBus}}).Check(bounded(t)); !fault.Is(err, fault.Unavailable) {
		t.Errorf("with the bus alone: %v", err)
	}
}
