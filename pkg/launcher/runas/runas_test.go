package runas

import (
	"slices"
	"strings"
	"testing"
)

func TestArgvIsReadBack(t *testing.T) {
	argv := Argv("helper", 2100007, 4294967294, "helper", "--name", "a")
	uid, gid, args, ok := Parse(argv)
	if !ok || uid != 2100007 || gid != 4294967294 || !slices.Equal(args, []string{"helper", "--name", "a"}) {
		t.Errorf("%d %d %q %v", uid, gid, args, ok)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"p run-as 1000 1000 helper", "p run-as 0 0", "p run-as 999 1000", "p run-as -1 1000", "p run-as 4294967295 1000", "p run-as 01000 1000", "p run-as +1000 1000",
		"p run-as 1000", "p helper", "",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		argv := strings.Split(line, " ")
		uid, gid, args, ok := Parse(argv)
		if !ok {
			return
		}
		if uid < minID || gid < minID || uid == 1<<32-1 || gid == 1<<32-1 {
			t.Fatalf("%q: %d %d", line, uid, gid)
		}
		if again := Argv(argv[0], uid, gid, args...); !slices.Equal(again, argv) {
			t.Fatalf("%q is another spelling of %q", argv, again)
		}
	})
}

func TestNobodyBecomesRoot(t *testing.T) {
	for _, argv := range [][]string{nil, {"p"}, {"p", Mode}, {"p", Mode, "0", "0", "x"}, {"p", Mode, "1000", "0", "x"}} {
		if err := Exec(argv, func([]string) error { return nil }); err == nil {
			t.Fatalf("%q: it returned without an error", argv)
		}
	}
}
