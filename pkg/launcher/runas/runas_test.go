package runas

import (
	"slices"
	"strings"
	"testing"
)

func TestArgvIsReadBack(t *testing.T) {
	for _, join := range []bool{false, true} {
		want := Identity{UID: 2100007, GID: 4294967294, Join: join}
		got, args, ok := Parse(want.Argv("helper", "helper", "--name", "a"))
		if !ok || got != want || !slices.Equal(args, []string{"helper", "--name", "a"}) {
			t.Errorf("%+v %q %v, want %+v", got, args, ok, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"p run-as 1000 1000 helper", "p run-as 0 0", "p run-as 999 1000", "p run-as -1 1000", "p run-as 4294967295 1000",
		"p run-as 01000 1000", "p run-as +1000 1000",
		"p run-as 1000", "p run-as 1000 1000 --join helper", "p run-as 1000 1000 --join --join", "p helper", "",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		argv := strings.Split(line, " ")
		i, args, ok := Parse(argv)
		if !ok {
			return
		}
		if i.UID < minID || i.GID < minID || i.UID == 1<<32-1 || i.GID == 1<<32-1 {
			t.Fatalf("%q: %+v", line, i)
		}
		if again := i.Argv(argv[0], args...); !slices.Equal(again, argv) {
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
