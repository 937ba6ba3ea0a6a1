package copier

import (
	"fmt"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

func TestWhichVersionWasCurrent(t *testing.T) {
	cut := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	object := func(id string, after time.Duration) buckets.Version {
		return buckets.Version{Key: "v/key", ID: id, Time: cut.Add(after)}
	}
	marker := func(id string, after time.Duration) buckets.Version {
		v := object(id, after)
		v.Deleted = true
		return v
	}
	latest := func(v buckets.Version) buckets.Version {
		v.Latest = true
		return v
	}
	const s = time.Second
	for name, c := range map[string]struct {
		versions []buckets.Version
		want     string // "": none
	}{
		"written at the cut":           {[]buckets.Version{latest(object("2", s)), object("1", 0)}, "1"},
		"written after it":             {[]buckets.Version{latest(object("1", s))}, ""},
		"the newest up to the cut":     {[]buckets.Version{object("3", s), object("2", -s), object("1", -2*s)}, "2"},
		"two of one time":              {[]buckets.Version{latest(object("3", s)), object("2", 0), object("1", 0)}, "2"},
		"deleted before":               {[]buckets.Version{latest(marker("2", -s)), object("1", -2*s)}, ""},
		"deleted at the cut":           {[]buckets.Version{latest(marker("2", 0)), object("1", -s)}, ""},
		"deleted after":                {[]buckets.Version{latest(marker("2", s)), object("1", 0)}, "1"},
		"deleted and written again":    {[]buckets.Version{latest(object("3", 0)), marker("2", 0), object("1", 0)}, "3"},
		"deleted in the same second":   {[]buckets.Version{latest(object("3", s)), marker("2", 0), object("1", 0)}, ""},
		"latest although listed apart": {[]buckets.Version{object("1", 0), latest(marker("2", 0))}, ""},
		"listed apart, in doubt":       {[]buckets.Version{latest(object("3", s)), object("1", 0), marker("2", 0)}, "1"},
		"listed apart, written later":  {[]buckets.Version{latest(object("4", s)), object("3", 0), object("1", -2*s), marker("2", -s)}, "3"},
		"listed apart, deleted later":  {[]buckets.Version{latest(object("4", s)), object("1", -2*s), marker("2", -s)}, ""},
		"from before versioning":       {[]buckets.Version{latest(object("2", s)), object("null", -s)}, "null"},
		"only markers":                 {[]buckets.Version{latest(marker("2", 0)), marker("1", 0)}, ""},
	} {
		got, found, err := asOf(c.versions, cut)
		if err != nil || found != (c.want != "") || got.ID != c.want && found {
			t.Errorf("%s: %+v, %t, %v", name, got, found, err)
		}
		var kept []buckets.Version
		for _, v := range c.versions {
			if len(kept) == 0 || (Versions{At: cut}).decides(kept, v) {
				kept = append(kept, v)
			}
		}
		if again, also, err := asOf(kept, cut); again != got || also != found || err != nil {
			t.Errorf("%s, of the versions that are kept: %+v, %t, %v", name, again, also, err)
		}
	}
	if _, _, err := asOf([]buckets.Version{latest(object("null", s)), object("1", -s)}, cut); !fault.Is(err, fault.Precondition) {
		t.Errorf("overwritten without a version: %v", err)
	}
}

// All versions of a key are listed before it is decided, and there may be millions of them.
func TestOnlyVersionsThatDecideAreKept(t *testing.T) {
	cut := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	source := Versions{At: cut}
	var all, kept []buckets.Version
	for i := range 1000 {
		v := buckets.Version{Key: "key", ID: fmt.Sprint(i), Time: cut.Add(time.Duration(500-i) * time.Second), Latest: i == 0, Deleted: i%3 == 1}
		all = append(all, v)
		if len(kept) == 0 || source.decides(kept, v) {
			kept = append(kept, v)
		}
	}
	want, _, _ := asOf(all, cut)
	if got, found, err := asOf(kept, cut); got != want || !found || err != nil || len(kept) > 3 {
		t.Errorf("%d kept: %+v, %t, %v, want %+v", len(kept), got, found, err, want)
	}
	suspended := buckets.Version{Key: "key", ID: "null", Time: cut.Add(time.Second)}
	if !source.decides(kept, suspended) {
		t.Error("a version that shows that versioning was suspended is dropped")
	}
}
