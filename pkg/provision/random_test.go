//go:build !race

package provision_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"pgregory.net/rapid"
)

// checks is how many histories TestModel_HistoriesEndWell plays in each of its two parts, unless -rapid.checks or RAPID_CHECKS says otherwise.
const checks = "300"

func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue && os.Getenv("RAPID_CHECKS") == "" {
		if err := flag.Set("rapid.checks", checks); err != nil {
			panic(err)
		}
	}
	if err := flag.Set("rapid.nofailfile", "true"); err != nil { // the failure has the seed
		panic(err)
	}
	os.Exit(m.Run())
}

func histories() *rapid.Generator[history] {
	often := func(none int, values ...int) *rapid.Generator[int] {
		return rapid.SampledFrom(append(make([]int, none), values...))
	}
	one := rapid.Custom(func(t *rapid.T) step {
		return step{
			Do: rapid.SampledFrom([]command{
				create, create, create, write, write, clone, clone, snap, snap, restore, restore, restoreDirect, restoreDirect, remove, remove, removeSnap,
				nothing, nothing, expand, modify, unlink, archive, list,
			}).Draw(t, "do"),
			On:       rapid.IntRange(0, processes-1).Draw(t, "on"),
			Name:     rapid.IntRange(0, names-1).Draw(t, "name"),
			Class:    rapid.IntRange(0, classes-1).Draw(t, "class"),
			Of:       rapid.IntRange(0, 3).Draw(t, "of"),
			Requests: rapid.SampledFrom([]int{1000, 1000, 1000, 1000, 1000, 1000, 0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30}).Draw(t, "requests"),
			Of1:      often(2, 1, 2, 3).Draw(t, "of1"),
			Order:    often(1, 1, 2, 3).Draw(t, "order"),
			Then:     trouble(often(5, 1, 2, 3, 4, 5, 6, 7).Draw(t, "then")),
		}
	})
	return rapid.Custom(func(t *rapid.T) history {
		return history{
			Copies:   rapid.SampledFrom([]conditions{honoured, honoured, refused, ignored}).Draw(t, "copies"),
			PageSize: rapid.SampledFrom([]int{1000, 2, 3}).Draw(t, "pageSize"),
			Versions: rapid.Bool().Draw(t, "versions"),
			Steps:    rapid.SliceOfN(one, 2, 24).Draw(t, "steps"),
		}
	})
}

// Any history of commands, lost answers, delays and killed processes ends well: see oracle and model.
func TestModel_HistoriesEndWell(t *testing.T) {
	for n := range 2 {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			all := histories()
			rapid.Check(t, func(rt *rapid.T) {
				if err := play(t, all.Draw(rt, "history")); err != nil {
					rt.Fatal(err)
				}
			})
		})
	}
}
