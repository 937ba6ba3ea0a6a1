//go:build !race

package provision_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// lab is a world without faults, in which a test makes calls.
type lab struct {
	*testing.T
	w *world
}

// inLab runs a test in a world of its own, which has the shared bucket.
func inLab(t *testing.T, test func(l lab)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		defer w.close()
		w.s.make(shared, nil)
		test(lab{t, w})
	})
}

// together makes calls of one process at once, and returns their errors.
func (l lab) together(runs ...func(ctx context.Context, p *process) error) []error {
	errs := make([]error, len(runs))
	p := l.w.process(0)
	for i, run := range runs {
		l.w.call(p, time.Minute, "test", func(ctx context.Context) error { return run(ctx, p) }, func(c *call) { errs[i] = c.err })
	}
	l.w.quiet()
	return errs
}

func (l lab) do(run func(ctx context.Context, p *process) error) error { return l.together(run)[0] }

func parameters(t *testing.T, name string, pairs ...string) volume.Parameters {
	t.Helper()
	given := map[string]string{"backend": "lab"}
	for i := 0; i < len(pairs); i += 2 {
		given[pairs[i]] = pairs[i+1]
	}
	params, err := volume.ParseParameters(given, name)
	if err != nil {
		t.Fatal(err)
	}
	return params
}

func (l lab) ask(name string, pairs ...string) (id volume.ID, err error) {
	l.Helper()
	params := parameters(l.T, name, pairs...)
	err = l.do(func(ctx context.Context, p *process) (err error) {
		id, err = p.Create(ctx, provision.CreateRequest{Name: name, Parameters: params})
		return err
	})
	return id, err
}

func (l lab) create(name string, pairs ...string) volume.ID {
	l.Helper()
	id, err := l.ask(name, pairs...)
	if err != nil {
		l.Fatal(err)
	}
	return id
}

func (l lab) delete(id volume.ID) error {
	return l.do(func(ctx context.Context, p *process) error { return p.Delete(ctx, provision.DeleteRequest{ID: id}) })
}

func (l lab) change(id volume.ID, c provision.Change) (capacity int64, err error) {
	err = l.do(func(ctx context.Context, p *process) (err error) {
		capacity, err = p.Modify(ctx, provision.ModifyRequest{ID: id, Change: c})
		return err
	})
	return capacity, err
}

// want fails the test unless an error has a kind; Unknown: there is none.
func (l lab) want(what string, err error, kind fault.Kind) {
	l.Helper()
	if (err == nil) != (kind == fault.Unknown) || fault.KindOf(err) != kind {
		l.Errorf("%s: %v, want %s", what, err, kind)
	}
}

// kinds are a prefix volume and a bucket volume.
var kinds = map[string][]string{"prefix": {"bucketName", shared}, "bucket": nil}

func TestModify_SettingsAreRecorded(t *testing.T) {
	hourly := volume.Mutable{Usage: volume.Usage(time.Hour)}
	for kind, pairs := range kinds {
		t.Run(kind, func(t *testing.T) {
			inLab(t, func(l lab) {
				id, plain := l.create("v", append(pairs, "usage", "off")...), l.create("plain", pairs...)
				for i, step := range []struct {
					id   volume.ID
					c    provision.Change
					size int64
					kind fault.Kind
				}{
					{id, provision.Change{Required: 20, Limit: 20}, 20, fault.Unknown},
					{id, provision.Change{Required: 15}, 20, fault.Unknown},
					{id, provision.Change{Limit: 19}, 0, fault.OutOfRange},
					{id, provision.Change{Set: hourly}, 20, fault.Unknown},
					{id, provision.Change{Required: 21, Set: volume.Mutable{OnDelete: volume.OnDeletePurge}}, 21, fault.Unknown},
					{plain, provision.Change{Set: hourly}, 0, fault.Invalid},
					{plain, provision.Change{Set: volume.Mutable{Usage: volume.UsageOff}}, 0, fault.Unknown},
					{volume.ID{Backend: "lab", Bucket: id.Bucket, Prefix: "none/"}, provision.Change{Required: 1}, 0, fault.NotFound},
					{volume.ID{Backend: "lab", Bucket: "none"}, provision.Change{Required: 1}, 0, fault.NotFound},
					{volume.ID{Backend: "lab", Bucket: shared}, provision.Change{Required: 1}, 0, fault.NotFound},
				} {
					size, err := l.change(step.id, step.c)
					if l.want(fmt.Sprint(i), err, step.kind); err == nil && size != step.size {
						t.Errorf("%d: size %d, want %d", i, size, step.size)
					}
				}
				again, err := l.ask("v", append(pairs, "usage", "off")...)
				if err != nil || again != id {
					t.Errorf("a retry of the creation: %s, %v", again, err)
				}
				var read records.Settings
				err = l.do(func(ctx context.Context, p *process) error {
					be, err := l.w.config.Backend("lab")
					if err != nil {
						return err
					}
					client, err := p.s3.S3(ctx, be, credentials.Keys{}, "")
					if err == nil {
						read, err = records.ReadSettings(ctx, client, id)
					}
					return err
				})
				if err != nil || read.CapacityBytes != 21 || read.Usage != hourly.Usage {
					t.Errorf("recorded: %+v, %v", read, err)
				}
				writes := l.writes()
				if _, err := l.change(id, provision.Change{Required: 3, Limit: 30, Set: hourly}); err != nil || l.writes() != writes {
					t.Errorf("nothing to change: %v, and %d writes", err, l.writes()-writes)
				}
				if err := l.delete(id); err != nil {
					t.Error(err)
				}
				_, err = l.change(id, provision.Change{Required: 30})
				l.want("deleted", err, fault.NotFound)
			})
		})
	}
}

func (l lab) writes() int { return l.w.sent["PutObject"] + l.w.sent["PutBucketTagging"] }

func TestModify_TagsAreOfBucketsOnly(t *testing.T) {
	inLab(t, func(l lab) {
		id := l.create("v", "tags", "team=data,stage=test")
		_, err := l.change(id, provision.Change{Required: 5, Set: volume.Mutable{Tags: map[string]string{"team": "web", "stage": "", "new": "y"}}})
		l.want("bucket", err, fault.Unknown)
		tags := l.w.s.buckets[id.Bucket].tags
		if _, there := tags["stage"]; there || tags["team"] != "web" || tags["new"] != "y" || records.Tags(tags).Capacity() != 5 {
			l.Errorf("tags %v", tags)
		}
		many := map[string]string{}
		for i := range 50 {
			many[fmt.Sprint("tag", i)] = "x"
		}
		_, err = l.change(id, provision.Change{Set: volume.Mutable{Tags: many}})
		l.want("too many", err, fault.Invalid)
		_, err = l.change(l.create("w", "bucketName", shared), provision.Change{Set: volume.Mutable{Tags: map[string]string{"a": "b"}}})
		l.want("prefix", err, fault.Invalid)
	})
}

// In a versioned bucket there may be versions from before the volume.
func TestModify_PurgeNeedsTheVolumesOwnVersions(t *testing.T) {
	inLab(t, func(l lab) {
		l.w.s.buckets[shared].versioned = true
		purge := provision.Change{Set: volume.Mutable{OnDelete: volume.OnDeletePurge}}
		_, err := l.change(l.create("v", "bucketName", shared), purge)
		l.want("prefix", err, fault.Invalid)
		id := l.create("w")
		l.w.s.buckets[id.Bucket].versioned = true
		_, err = l.change(id, purge)
		l.want("bucket", err, fault.Unknown)
	})
}

// Requests that meet are one write, and one that is refused leaves the others.
func TestModify_RequestsThatMeetAreOneWrite(t *testing.T) {
	for kind, pairs := range kinds {
		t.Run(kind, func(t *testing.T) {
			inLab(t, func(l lab) {
				id := l.create("v", pairs...)
				if _, err := l.change(id, provision.Change{Required: 1}); err != nil { // what is found out once is known from here on
					t.Fatal(err)
				}
				var runs []func(context.Context, *process) error
				for i := range 20 {
					c := provision.Change{Required: int64(100 + i)}
					if i == 7 {
						c = provision.Change{Set: volume.Mutable{Usage: volume.Usage(time.Hour)}}
					}
					runs = append(runs, func(ctx context.Context, p *process) error {
						_, err := p.Modify(ctx, provision.ModifyRequest{ID: id, Change: c})
						return err
					})
				}
				writes := l.writes()
				for i, err := range l.together(runs...) {
					l.want(fmt.Sprint(i), err, map[bool]fault.Kind{true: fault.Invalid, false: fault.Unknown}[i == 7])
				}
				if n := l.writes() - writes; n != 1 {
					t.Errorf("%d writes", n)
				}
				if size, err := l.change(id, provision.Change{}); err != nil || size != 119 {
					t.Errorf("size %d, %v", size, err)
				}
			})
		})
	}
}

func (l lab) list(limit int) (found []string, err error) {
	err = l.do(func(ctx context.Context, p *process) error {
		for token := ""; ; {
			page, next, err := p.List(ctx, limit, token)
			for _, v := range page {
				found = append(found, v.ID.Bucket+"/"+v.ID.Prefix)
			}
			if token = next; err != nil || token == "" {
				return err
			}
		}
	})
	return found, err
}

func TestList_PagesHaveEachVolumeOnce(t *testing.T) {
	inLab(t, func(l lab) {
		var want []string
		for i := range 5 {
			id := l.create(fmt.Sprint("v", i), "bucketName", shared, "prefix", "base/")
			want = append(want, id.Bucket+"/"+id.Prefix)
		}
		own := l.create("own")
		want = append(want, own.Bucket+"/")
		slices.Sort(want)
		if err := l.delete(l.create("deleted", "bucketName", shared)); err != nil {
			l.Fatal(err)
		}
		for _, key := range []string{"garbage", "a/b"} {
			l.w.s.put(shared, records.Key(key), "x")
		}
		for _, limit := range []int{0, 1, 2, 6, 1000} {
			if got, err := l.list(limit); err != nil || !slices.Equal(got, want) {
				l.Errorf("limit %d: %q, %v, want %q", limit, got, err, want)
			}
		}
		for _, id := range []volume.ID{own, {Backend: "lab", Bucket: shared, Prefix: "base/v3/"}, {Backend: "lab", Bucket: shared, Prefix: "base/v9/"}} {
			err := l.do(func(ctx context.Context, p *process) error {
				v, err := p.Get(ctx, id)
				if err == nil && v.ID != id {
					l.Errorf("%s: %+v", id, v)
				}
				return err
			})
			l.want("get "+id.String(), err, map[bool]fault.Kind{true: fault.NotFound, false: fault.Unknown}[strings.Contains(id.Prefix, "v9")])
		}
		if !l.w.process(0).CanList() {
			l.Error("cannot list with the controller's own credentials")
		}
		for _, token := range []string{"x", "e30", "eyJiIjoibm9uZSJ9"} {
			err := l.do(func(ctx context.Context, p *process) error {
				_, _, err := p.List(ctx, 2, token)
				return err
			})
			l.want("token "+token, err, fault.Busy)
		}
	})
}

// A page goes on where the last one ended, whatever was created and deleted meanwhile.
func TestList_PagesGoOnAfterChanges(t *testing.T) {
	inLab(t, func(l lab) {
		var ids []volume.ID
		for i := range 6 {
			ids = append(ids, l.create(fmt.Sprint("v", i), "bucketName", shared))
		}
		var got []string
		page := func(limit int, token string) (next string) {
			if err := l.do(func(ctx context.Context, p *process) error {
				found, end, err := p.List(ctx, limit, token)
				for _, v := range found {
					got = append(got, v.ID.Prefix)
				}
				next = end
				return err
			}); err != nil {
				l.Fatal(err)
			}
			return next
		}
		token := page(2, "")
		for _, id := range ids[1:3] {
			if err := l.delete(id); err != nil {
				l.Fatal(err)
			}
		}
		l.create("v0-new", "bucketName", shared)
		l.create("v4-new", "bucketName", shared)
		page(0, token)
		if want := []string{"v0/", "v0-new/", "v3/", "v4/", "v4-new/", "v5/"}; !slices.Equal(got, want) && !slices.Equal(got[2:], want[2:]) {
			l.Errorf("%q", got)
		}
	})
}

// Buckets that cannot be read are no error, unless all buckets cannot be listed.
func TestList_DeniedBucketsAreSkipped(t *testing.T) {
	inLab(t, func(l lab) {
		l.create("v", "bucketName", shared)
		for operation, kind := range map[string]fault.Kind{"ListBuckets": fault.Denied, "ListObjectsV2": fault.Unknown, "GetBucketTagging": fault.Unknown} {
			l.w.denied = []string{operation}
			got, err := l.list(0)
			if l.want(operation, err, kind); operation == "ListObjectsV2" && len(got) > 0 {
				l.Errorf("%s: %q", operation, got)
			}
		}
	})
}

func TestInventory_HasWhatEachRecordSays(t *testing.T) {
	inLab(t, func(l lab) {
		source := l.create("source", "bucketName", shared)
		l.create("own")
		l.create("based", "bucketName", shared, "prefix", "base/")
		if err := l.delete(l.create("deleted", "bucketName", shared)); err != nil {
			l.Fatal(err)
		}
		params, err := volume.ParseSnapshotParameters(nil)
		if err != nil {
			l.Fatal(err)
		}
		if err := l.do(func(ctx context.Context, p *process) error {
			_, err := p.CreateSnapshot(ctx, provision.SnapshotRequest{Name: "s", Source: source, Parameters: params})
			return err
		}); err != nil {
			l.Fatal(err)
		}
		stored, _ := l.w.s.buckets[shared].get(records.Key("source"))
		l.w.s.make("copied", nil)
		l.w.s.put("copied", records.Key("source"), stored.body)
		l.w.s.put(shared, records.Key("garbage"), "x")
		inventory := func(backend string) (texts []string, unread int, err error) {
			err = l.do(func(ctx context.Context, p *process) error {
				found, more, err := p.Inventory(ctx, backend)
				for _, e := range found {
					text := fmt.Sprintf("%s %s %s", e.Kind, e.Name, e.State)
					if e.Err != nil {
						text = "unreadable " + e.Key
					}
					if e.Misplaced() {
						text += " misplaced"
					}
					texts = append(texts, text)
				}
				unread = len(more)
				return err
			})
			slices.Sort(texts)
			return texts, unread, err
		}
		got, unread, err := inventory("")
		want := []string{
			"reservation base base", "snapshot s ready", "unreadable " + records.Key("garbage"), "volume based active", "volume deleted deleted",
			"volume own active", "volume source active", "volume source active misplaced",
		}
		if err != nil || unread > 0 || !slices.Equal(got, want) {
			l.Errorf("%q, %d unread, %v, want %q", got, unread, err, want)
		}
		l.w.denied = []string{"ListObjectsV2"}
		if _, unread, err := inventory("lab"); err != nil || unread != 2 {
			l.Errorf("buckets that cannot be read: %d, %v", unread, err)
		}
		_, _, err = inventory("none")
		l.want("a backend that is not configured", err, fault.KindOf(err))
	})
}

func TestLookup_OnlyVolumesThatAreThere(t *testing.T) {
	for kind, pairs := range kinds {
		t.Run(kind, func(t *testing.T) {
			inLab(t, func(l lab) {
				id := l.create("v", pairs...)
				look := func(place bool) error {
					return l.do(func(ctx context.Context, p *process) error {
						if place {
							return p.LookupPlace(ctx, provision.LookupRequest{ID: id, Keys: credentials.Keys{}})
						}
						return p.Lookup(ctx, provision.LookupRequest{ID: id})
					})
				}
				l.want("volume", look(false), fault.Unknown)
				l.want("empty place", look(true), map[bool]fault.Kind{true: fault.NotFound, false: fault.Unknown}[kind == "prefix"])
				l.w.s.put(id.Bucket, id.Prefix+"file", "x")
				l.want("place", look(true), fault.Unknown)
				l.w.denied = []string{"DeleteObjects", "DeleteObject"}
				l.want("a deletion that is refused", l.delete(id), fault.Denied)
				l.want("being deleted", look(false), fault.NotFound)
				l.want("place being deleted", look(true), fault.NotFound)
				_, err := l.ask("v", pairs...)
				l.want("creation meanwhile", err, fault.Busy)
				l.w.denied = nil
				l.want("deletion", l.delete(id), fault.Unknown)
				l.want("deleted", look(false), fault.NotFound)
				l.want("deletion again", l.delete(id), fault.Unknown)
			})
		})
	}
}

// What is in a place without a record is not touched.
func TestDelete_UnownedDataIsKept(t *testing.T) {
	inLab(t, func(l lab) {
		l.w.s.put(shared, "v/file", "x")
		l.w.s.make("foreign", map[string]string{"owner": "x"})
		l.w.s.put("foreign", "file", "x")
		_, err := l.ask("v", "bucketName", shared)
		l.want("creation", err, fault.Exists)
		for _, id := range []volume.ID{{Backend: "lab", Bucket: shared, Prefix: "v/"}, {Backend: "lab", Bucket: "foreign"}} {
			l.want(id.String(), l.delete(id), fault.Precondition)
		}
		l.want("nothing there", l.delete(volume.ID{Backend: "lab", Bucket: shared, Prefix: "none/"}), fault.Unknown)
		l.want("no bucket", l.delete(volume.ID{Backend: "lab", Bucket: "none", Prefix: "v/"}), fault.Unknown)
		l.want("no access point", l.delete(volume.ID{Backend: "lab", Bucket: "none-s3alias", Prefix: "v/"}), fault.Precondition)
		_, err = l.ask("inner", "bucketName", l.create("own").Bucket)
		l.want("a volume in a bucket volume", err, fault.Precondition)
		_, err = l.ask("inner", "bucketName", "none")
		l.want("a volume in no bucket", err, fault.Precondition)
	})
}

func TestDelete_OwnTestObjectsAreNoUsersData(t *testing.T) {
	inLab(t, func(l lab) {
		id := l.create("v", "onDelete", "requireEmpty")
		b := l.w.s.buckets[id.Bucket]
		b.versioned = true
		l.w.s.put(id.Bucket, buckets.Probes+"object", "test")
		l.w.s.remove(id.Bucket, buckets.Probes+"object", "") // its version is left
		l.w.s.put(id.Bucket, buckets.Probes+"other", "test")
		b.uploads["lost"] = &upload{key: buckets.Probes + "upload"}
		b.uploads["user"] = &upload{key: "data"}
		l.want("with an unfinished upload of a user", l.delete(id), fault.Precondition)
		delete(b.uploads, "user")
		l.w.s.put(id.Bucket, "zz", "user")
		l.want("with an object of a user", l.delete(id), fault.Precondition)
		delete(b.objects, "zz")
		if l.want("with test objects only", l.delete(id), fault.Unknown); l.w.s.buckets[id.Bucket] != nil {
			l.Error("the bucket is there")
		}
	})
}

func TestCreate_BucketsAreTaggedWhereCreationDropsTags(t *testing.T) {
	inLab(t, func(l lab) {
		l.w.s.dropTags = true
		id := l.create("v")
		if tags := records.Tags(l.w.s.buckets[id.Bucket].tags); tags[records.TagVolume] != id.String() {
			l.Errorf("tags %v", tags)
		}
		l.w.denied = []string{"PutBucketTagging"}
		_, err := l.ask("untagged")
		if l.want("a bucket that cannot be tagged", err, fault.Precondition); l.w.s.buckets["untagged"] != nil {
			l.Error("the bucket is left")
		}
		l.w.denied = []string{"PutBucketTagging", "DeleteBucket"}
		_, err = l.ask("left")
		l.want("a bucket that cannot be removed either", err, fault.Busy)
		l.w.denied = nil
		_, err = l.ask("left")
		l.want("a bucket without tags", err, fault.Exists)
		l.w.denied = []string{"CreateBucket"}
		_, err = l.ask("denied")
		l.want("no bucket may be created", err, fault.Denied)
	})
}

func TestCreate_VolumesAreNotNested(t *testing.T) {
	inLab(t, func(l lab) {
		outer := l.create("outer", "bucketName", shared, "prefix", "a/")
		for _, c := range []struct {
			name, base string
			kind       fault.Kind
		}{
			{"inner", "a/outer/", fault.Precondition}, {"inner", "x/outer/", fault.Unknown}, {"inner", "y/", fault.Exists}, {"a", "", fault.Exists},
			{"own", "own/", fault.Unknown}, {"own", "own/", fault.Unknown},
		} {
			_, err := l.ask(c.name, "bucketName", shared, "prefix", c.base)
			l.want(c.name+" in "+c.base, err, c.kind)
		}
		l.want("deletion", l.delete(outer), fault.Unknown)
		_, err := l.ask("inner2", "bucketName", shared, "prefix", "a/outer/")
		l.want("where a volume was", err, fault.Precondition)
		l.w.denied = []string{"GetBucketTagging"}
		l.create("no-tags-to-read", "bucketName", shared)
	})
}

func TestDelete_ServicesWithoutMultiDelete(t *testing.T) {
	inLab(t, func(l lab) {
		l.w.lacking = []string{"DeleteObjects"}
		for _, onDelete := range []string{"delete", "purge"} {
			id := l.create(onDelete, "bucketName", shared, "onDelete", onDelete)
			for i := range 3 {
				l.w.s.put(shared, fmt.Sprint(id.Prefix, i), "x")
			}
			l.w.denied = []string{"DeleteObject"}
			l.want("objects that may not be deleted", l.delete(id), fault.Denied)
			l.w.denied = nil
			l.want("deletion", l.delete(id), fault.Unknown)
			if left := l.w.s.buckets[shared].below(id.Prefix); len(left) > 0 {
				l.Errorf("left: %q", left)
			}
		}
	})
}

func TestDelete_OnDeleteDecides(t *testing.T) {
	for kind, pairs := range kinds {
		t.Run(kind, func(t *testing.T) {
			inLab(t, func(l lab) {
				full := func(onDelete string) volume.ID {
					id := l.create(onDelete, append(slices.Clone(pairs), "onDelete", onDelete)...)
					l.w.s.put(id.Bucket, id.Prefix+"file", "x")
					return id
				}
				id := full("requireEmpty")
				l.want("requireEmpty", l.delete(id), fault.Precondition)
				l.w.s.remove(id.Bucket, id.Prefix+"file", "")
				l.want("empty", l.delete(id), fault.Unknown)
				id = full("retain")
				l.want("retain", l.delete(id), fault.Unknown)
				if _, there := l.w.s.buckets[id.Bucket].get(id.Prefix + "file"); !there {
					t.Error("the data is gone")
				}
				l.want("retain, again", l.delete(id), fault.Unknown)
				for onDelete, want := range map[string]fault.Kind{"delete": fault.Precondition, "purge": fault.Unknown} {
					if kind == "prefix" { // its versions do not keep it from being deleted
						want = fault.Unknown
					}
					id := l.create(onDelete, append(slices.Clone(pairs), "onDelete", onDelete)...)
					l.w.s.buckets[id.Bucket].versioned = true
					l.w.s.put(id.Bucket, id.Prefix+"file", "x")
					l.want(onDelete+" with versions", l.delete(id), want)
				}
				if kind == "bucket" {
					id = full("requireEmpty")
					l.w.s.buckets[id.Bucket].versioned = true
					l.w.s.remove(id.Bucket, "file", "")
					l.want("versions in a bucket that must be empty", l.delete(id), fault.Precondition)
					l.w.s.buckets[id.Bucket].tags[records.TagOnDelete] = "maybe"
					l.want("a tag that says nothing", l.delete(id), fault.Precondition)
				}
			})
		})
	}
}
