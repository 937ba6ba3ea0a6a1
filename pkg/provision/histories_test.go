//go:build !race

package provision_test

import (
	"fmt"
	"testing"
)

// all is more requests than any command takes.
const all = 1000

// A step is disturbed after each number of requests: its process is suspended until the steps after it have been played, or is killed, or loses an
// answer. The steps after it are those of another process.
func TestModel_CommandsDisturbedAnywhereEndWell(t *testing.T) {
	t.Parallel()
	const bucketVolume = 3 // a class
	volume := step{Do: create, Requests: all}
	withBucket := step{Do: create, Class: bucketVolume, Requests: all}
	file, large := step{Do: write}, step{Do: write, Name: 1}
	for name, c := range map[string]struct {
		before []step
		step   step
		after  []step
	}{
		"creation": {
			nil, step{Do: create}, nil,
		},
		"creation of a bucket": {
			nil, withBucket, nil,
		},
		"deletion": {
			[]step{volume, file}, step{Do: remove}, nil,
		},
		"deletion of a bucket": {
			[]step{withBucket, file}, step{Do: remove}, nil,
		},
		"snapshot": {
			[]step{volume, file}, step{Do: snap}, nil,
		},
		"snapshot of a bucket that is deleted": {
			[]step{withBucket, file}, step{Do: snap}, []step{{Do: remove, On: 1, Requests: all}},
		},
		"clone": {
			[]step{volume, file}, step{Do: clone, Name: 1}, nil,
		},
		"clone of a volume that is deleted": {
			[]step{volume, file}, step{Do: clone, Name: 1}, []step{{Do: remove, On: 1, Requests: all}},
		},
		"clone of a bucket that is deleted": {
			[]step{withBucket, file}, step{Do: clone, Name: 1}, []step{{Do: remove, On: 1, Requests: all}},
		},
		"clone of a bucket that does not exist": {
			[]step{withBucket, {Do: remove, Requests: all}}, step{Do: clone, Name: 1}, nil,
		},
		"clone of a large file": {
			[]step{volume, large}, step{Do: clone, Name: 1}, nil,
		},
		"clone of a large file that is deleted": {
			[]step{volume, large}, step{Do: clone, Name: 1}, []step{{Do: remove, On: 1, Requests: all}},
		},
		"change that another process makes, too": {
			[]step{volume}, step{Do: modify, Class: 2}, []step{{Do: expand, On: 1, Requests: all}},
		},
		"change of a bucket": {
			[]step{withBucket}, step{Do: modify, Class: 2}, nil,
		},
		"volume that is a snapshot": {
			[]step{volume, file, {Do: snap, Requests: all}}, step{Do: restoreDirect, Name: 1}, []step{{Do: removeSnap, On: 1, Requests: all}},
		},
		"deletion of a snapshot that becomes a volume": {
			[]step{volume, file, {Do: snap, Requests: all}}, step{Do: removeSnap}, []step{{Do: restoreDirect, Name: 1, On: 1, Requests: all}},
		},
		"restore of a snapshot that is deleted": {
			[]step{volume, file, {Do: snap, Requests: all}}, step{Do: restore, Name: 1}, []step{{Do: removeSnap, On: 1, Requests: all}},
		},
		"clone that another process begins, too": {
			[]step{volume, file}, step{Do: clone, Name: 1}, []step{{Do: clone, Name: 1, On: 1, Requests: 14}},
		},
		"clone that another process makes, too": {
			[]step{volume, file}, step{Do: clone, Name: 1}, []step{{Do: clone, Name: 1, On: 1, Requests: all}},
		},
		"snapshot that another process begins, too": {
			[]step{volume, file}, step{Do: snap}, []step{{Do: snap, On: 1, Requests: 14}},
		},
		"clone that fails, and that another process makes": {
			[]step{volume, file, {Do: archive}}, step{Do: clone, Name: 1}, []step{{Do: archive}, {Do: clone, Name: 1, On: 1, Requests: all}},
		},
		"clone into a bucket that fails, and that another process makes": {
			[]step{volume, file, {Do: archive}}, step{Do: clone, Name: 1, Class: bucketVolume},
			[]step{{Do: archive}, {Do: clone, Name: 1, Class: bucketVolume, On: 1, Requests: all}},
		},
		"snapshot that fails, and that another process makes": {
			[]step{volume, file, {Do: archive}}, step{Do: snap}, []step{{Do: archive}, {Do: snap, On: 1, Requests: all}},
		},
		"creation of the next generation that another process makes and uses": {
			[]step{volume, {Do: remove, Requests: all}}, step{Do: create}, []step{{Do: create, On: 1, Requests: all}, file},
		},
		"deletion of a volume that another process deletes and makes again": {
			[]step{volume, file}, step{Do: remove}, []step{{Do: remove, On: 1, Requests: all}, {Do: create, On: 1, Requests: all}, file},
		},
		"deletion of a volume that must be empty, and that is written to": {
			[]step{{Do: create, Class: 1, Requests: all}}, step{Do: remove}, []step{file},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for trouble, every := range map[trouble]int{none: 1, killNow: 1, loseAnswer: 4} {
				for n := 0; n < 32 && (trouble != none || c.after != nil); n += every {
					c.step.Requests, c.step.Then = n, trouble
					h := history{PageSize: 1000}
					h.Steps = append(append(append(h.Steps, c.before...), c.step), c.after...)
					for i := range h.Steps {
						h.Steps[i].Of1 = h.Steps[i].On + 1 // a process is suspended while the other one is at work
					}
					if err := play(t, h); err != nil {
						t.Fatal(fmt.Errorf("%d after %d requests: %w", trouble, n, err))
					}
				}
			}
		})
	}
}
