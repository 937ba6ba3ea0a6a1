package clientcheck

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// fake is a node, a client and a bucket. Its volume is a directory, whose files are the objects.
type fake struct {
	target      string
	hangs       string // the call that has no answer
	refuses     string // the call that fails
	loses       string // the object that is not stored
	undeletes   bool   // a deleted file exists again
	left        []string
	publishErr  error
	busy        int // unpublishes that are refused
	interrupt   func()
	sessions    []Session // one after the other
	pid         int
	published   bool
	unpublished bool
	removed     int
}

func (f *fake) Publish(ctx context.Context) error {
	if f.hangs == "publish" {
		<-ctx.Done()
		return ctx.Err()
	}
	f.published = f.publishErr == nil
	return f.publishErr
}

func (f *fake) Unpublish(context.Context) error {
	if f.busy--; f.busy >= 0 {
		return fault.Errorf(fault.Busy, "another request is in flight")
	}
	f.unpublished = true
	return nil
}

func (f *fake) Session(context.Context) (s Session, err error) {
	if len(f.sessions) == 0 {
		return s, errors.New("the helper does not answer")
	}
	s = f.sessions[0]
	if len(f.sessions) > 1 {
		f.sessions = f.sessions[1:]
	}
	return s, nil
}

func (f *fake) Get(_ context.Context, key string) ([]byte, error) {
	if key == f.loses {
		return nil, fs.ErrNotExist
	}
	return os.ReadFile(filepath.Join(f.target, key))
}

func (f *fake) Put(_ context.Context, key string, data []byte) error {
	if key == f.loses {
		return nil
	}
	return os.WriteFile(filepath.Join(f.target, key), data, 0o600)
}

func (f *fake) Size(ctx context.Context, key string) (int64, error) {
	data, err := f.Get(ctx, key)
	return int64(len(data)), err
}

func (f *fake) Remove(context.Context) error { f.removed++; return nil }

func (f *fake) Do(ctx context.Context, what string, fn func() error) error {
	if f.interrupt != nil && strings.HasPrefix(what, "write") {
		f.interrupt()
		<-ctx.Done()
		return ctx.Err()
	}
	if f.undeletes && what == "look for the deleted file" {
		if err := os.WriteFile(filepath.Join(f.target, "deleted"), nil, 0o600); err != nil {
			return err
		}
	}
	switch what {
	case f.hangs:
		<-ctx.Done()
		return ctx.Err()
	case f.refuses:
		return errors.New("operation not permitted")
	}
	return fn()
}

func (f *fake) Clients(context.Context) ([]int, error) { return []int{f.pid}, nil }

func (f *fake) Kill(int) error {
	if f.hangs != "heal" {
		f.pid++
	}
	return nil
}

func (f *fake) Left(context.Context) ([]string, error) { return f.left, nil }

// large is the size of the large file.
const large = 9 << 20

// failed returns the rows without the result yes, as "check result".
func failed(s check.Section) string {
	var all []string
	for _, row := range s.Rows {
		if row.Result != check.Yes && row.Check != "clientRenewal" {
			all = append(all, row.Check+" "+string(row.Result))
		}
	}
	return strings.Join(all, ", ")
}

func TestRowsAndNotes(t *testing.T) {
	t.Parallel()
	const unmounted = "clientList unknown, clientWrite unknown, clientStored unknown, clientRead unknown, clientOverwrite unknown, " +
		"clientEmpty unknown, clientLarge unknown, clientOffset unknown, clientRemote unknown, clientRename unknown, clientDelete unknown, clientHeal unknown, " +
		"clientUnmount unknown, clientDrain unknown"
	const all = "drain: exits|needs: [delete]|cache: none or copies"
	for name, tt := range map[string]struct {
		fake   fake
		failed string
		notes  string // separated by |
		ok     bool
	}{
		"everything works":       {fake{busy: 2}, "", all, true},
		"no rename":              {fake{refuses: "rename"}, "clientRename no", all + "|rename: not supported", true},
		"a rename that is wrong": {fake{refuses: "read renamed"}, "clientRename no", all + "|rename: not supported", true},
		"no deletion":            {fake{undeletes: true}, "clientDelete no", "drain: exits|needs: [delete]", false},
		"an empty file is lost":  {fake{loses: "empty"}, "clientEmpty no", all, false},
		"a large file is lost":   {fake{loses: largeName}, "clientLarge no, clientHeal unknown", all, false},
		"no read at an offset":   {fake{refuses: "read at an offset"}, "clientOffset no", all, false},
		"no overwrite":           {fake{refuses: "read small"}, "clientRead no, clientOverwrite no", all, false},
		"a write has failed": {fake{refuses: "write small"}, "clientWrite no, clientStored unknown, clientRead no, clientOverwrite no",
			"drain: exits|needs: [delete]", false},
		"lost at unmount":   {fake{loses: "drain"}, "clientDrain no", "drain: unknown|needs: [delete]", false},
		"stored later":      {fake{loses: smallName}, "clientStored no, clientOverwrite no", "cache: unsent", false},
		"names are cached":  {fake{loses: "remote"}, "clientRemote no", "options: declare", true},
		"something is left": {fake{left: []string{"mount /x"}}, "clientLeft no", all, false},
		"no mount":          {fake{publishErr: errors.New("exit status 1")}, "clientMount no, " + unmounted, "", false},
		"no mount in time":  {fake{hangs: "publish"}, "clientMount no, " + unmounted, "", false},
		"no restart":        {fake{hangs: "heal"}, "clientHeal no, clientDrain unknown", "needs: [delete]", false},
		"a hang": {fake{hangs: "read small"}, "clientRead no, clientOverwrite unknown, clientEmpty unknown, clientLarge unknown, clientOffset unknown, " +
			"clientRemote unknown, clientRename unknown, " +
			"clientDelete unknown, clientHeal unknown, clientDrain unknown", "cache: none or copies", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := tt.fake
			f.target = t.TempDir()
			c := Check{Client: "x", Target: f.target, Volume: &f, Objects: &f, Host: &f, Large: large, Timeout: 600 * time.Millisecond}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if f.hangs == "publish" {
				time.AfterFunc(time.Millisecond, cancel)
			}
			s := c.Run(ctx)
			want := tt.failed
			if f.hangs == "publish" {
				want = strings.Replace(want, "clientMount no", "clientMount unknown", 1)
			}
			if got := failed(s); got != want {
				t.Errorf("not yes: %s\nwant %s", got, want)
			}
			notes := strings.Join(s.Notes, "\n")
			for want := range strings.SplitSeq(tt.notes, "|") {
				if !strings.Contains(notes, want) {
					t.Errorf("no note %q: %q", want, s.Notes)
				}
			}
			if tt.notes == "" && len(s.Notes) > 0 {
				t.Errorf("%q", s.Notes)
			}
			if ok := check.NewReport(s).OK; ok != tt.ok {
				t.Errorf("ok: %t", ok)
			}
			for _, row := range s.Rows {
				if strings.Contains(row.Why+row.Advice, "%!") || row.Result == check.No && row.Why == "" {
					t.Errorf("%+v", row)
				}
			}
			if !f.unpublished || f.removed == 0 {
				t.Errorf("unpublished: %t, removed: %d", f.unpublished, f.removed)
			}
			if i := slices.IndexFunc(s.Rows, func(r check.Row) bool { return strings.Contains(r.Why, "did not finish within") }); (i >= 0) != (f.hangs != "" &&
				f.hangs != "publish") {
				t.Errorf("the step that has hung: %d of %+v", i, s.Rows)
			}
		})
	}
}

// An interrupt stops the check, which unmounts and removes the objects nevertheless.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	f := &fake{target: t.TempDir(), interrupt: cancel}
	s := Check{Client: "x", Target: f.target, Volume: f, Objects: f, Host: f, Large: large, Timeout: time.Minute}.Run(ctx)
	if !f.unpublished || f.removed != 2 {
		t.Errorf("unpublished: %t, removed: %d", f.unpublished, f.removed)
	}
	if got := failed(s); !strings.HasPrefix(got, "clientWrite unknown, clientStored unknown") || check.NewReport(s).OK {
		t.Error(got)
	}
}

// A client that may lose files at its unmount is declared so.
func TestDrain_IsOptionalForClientsThatExitEarly(t *testing.T) {
	t.Parallel()
	f := &fake{target: t.TempDir(), loses: "drain"}
	s := Check{Client: "x", Target: f.target, Volume: f, Objects: f, Host: f, Large: large, ExitsEarly: true, Timeout: time.Second}.Run(t.Context())
	if !check.NewReport(s).OK || failed(s) != "clientDrain no" {
		t.Error(failed(s))
	}
}

// A session is renewed if there is another one after it has expired, and the client works with that.
func TestRenewal(t *testing.T) {
	t.Parallel()
	const lasts, next = time.Second, time.Hour // the validity of the first session and of the next one
	for name, tt := range map[string]struct {
		fake    fake
		lasts   []time.Duration // of the sessions, from the beginning; 0: they do not expire
		problem string          // with the last one
		renewal time.Duration
		static  bool
		result  check.Result
		why     string
		ok      bool
	}{
		"renewed":                 {lasts: []time.Duration{lasts, lasts, next}, renewal: lasts, result: check.Yes, ok: true},
		"renewed before the step": {lasts: []time.Duration{lasts, next}, renewal: lasts, result: check.Yes, ok: true},
		"not renewed":             {lasts: []time.Duration{lasts}, renewal: lasts, result: check.No, why: "not renewed"},
		"refused":                 {lasts: []time.Duration{lasts, lasts}, problem: "AccessDenied", renewal: lasts, result: check.No, why: "AccessDenied"},
		"no answer":               {renewal: lasts, result: check.No, why: "does not answer"},
		"the client has the former one": {fake: fake{refuses: "write renewed"}, lasts: []time.Duration{lasts, next}, renewal: lasts, result: check.No,
			why: "not permitted"},
		"nothing arrives": {fake: fake{loses: "renewed"}, lasts: []time.Duration{lasts, next}, renewal: lasts, result: check.No, why: "not exist"},
		"it lists nothing": {fake: fake{refuses: "list the root after the renewal"}, lasts: []time.Duration{lasts, next}, renewal: lasts, result: check.No,
			why: "not permitted"},
		"no session":            {lasts: []time.Duration{0}, renewal: lasts, result: check.Unknown, why: "no session"},
		"longer than asked for": {lasts: []time.Duration{next}, renewal: lasts, result: check.Unknown, why: "longer"},
		"not asked for":         {result: check.Unknown, why: "--session-duration", ok: true},
		"static keys":           {renewal: lasts, static: true, result: check.Unknown, why: "credentials: static", ok: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := tt.fake
			f.target = t.TempDir()
			began := time.Now()
			for _, d := range tt.lasts {
				s := Session{}
				if d != 0 {
					s.Expires = began.Add(d)
				}
				f.sessions = append(f.sessions, s)
			}
			if tt.problem != "" {
				f.sessions[len(f.sessions)-1].Problem = tt.problem
			}
			s := Check{Client: "x", Target: f.target, Volume: &f, Objects: &f, Host: &f, Large: large, StaticKeys: tt.static, Renewal: tt.renewal,
				Timeout: 3 * time.Second}.Run(t.Context())
			row := s.Rows[slices.IndexFunc(s.Rows, func(r check.Row) bool { return r.Check == "clientRenewal" })]
			if row.Result != tt.result || !strings.Contains(row.Why, tt.why) || check.NewReport(s).OK != tt.ok {
				t.Errorf("%+v", row)
			}
			if tt.result == check.Yes && time.Since(began) < lasts {
				t.Error("it did not wait for the end of the session")
			}
			if got := failed(s); got != "" {
				t.Error(got)
			}
		})
	}
}
