package controller

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// lister is a process with the controller's own credentials, which lists some buckets.
func (e *env) lister(buckets ...string) *process {
	e.t.Helper()
	text := fmt.Sprintf("backends:\n  lab:\n    endpoint: %s\n    region: %s\n    addressing: path\n    volumeBuckets: [%s]\n", e.endpoint, e.region,
		strings.Join(buckets, ", "))
	config, err := backend.ParseConfig([]byte(text), "", "")
	if err != nil {
		e.t.Fatal(err)
	}
	return e.process(func(o *processOptions) { o.config, o.driverKeys = config, e.keys })
}

// listed are the ids of all pages, and the number of pages.
func (p *process) listed(limit int) (ids []string, pages int) {
	p.e.t.Helper()
	token := ""
	for {
		page, next, err := p.List(p.e.ctx(), limit, token)
		if err != nil {
			p.e.t.Fatal(err)
		}
		if limit > 0 && len(page) > limit {
			p.e.t.Errorf("a page of %d, with a limit of %d", len(page), limit)
		}
		for _, v := range page {
			ids = append(ids, v.ID.String())
		}
		pages++
		if next == "" {
			return ids, pages
		}
		if next == token {
			p.e.t.Fatalf("the token repeats: %s", token)
		}
		token = next
	}
}

func TestVolumesAreListedInPages(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		var want []string
		for i := range 23 {
			want = append(want, p.create(fmt.Sprintf("v%02d", i), "prefix", "base/").String())
		}
		for i := range 20 { // tombstones, which take no place in pages
			p.delete(p.create(fmt.Sprintf("v%02d-deleted", i)))
		}
		own := p.create(e.bucket+"-own", "bucketName", "").String()
		e.process(cluster("other")).create("another-clusters")
		e.put(".s3-csi/volumes/garbage", ".s3-csi/volumes/a/b", ".s3-csi/other", "data")
		all := append(slices.Clone(want), own) // in the order of the buckets' names
		l := e.lister(e.bucket + "*")
		for _, limit := range []int{0, 1, 5, 23, 24, 1000} {
			got, pages := l.listed(limit)
			e.same(fmt.Sprintf("limit %d", limit), got, all)
			if limit > 0 && pages > (len(all)+20+3)/limit+2 {
				t.Errorf("limit %d: %d pages", limit, pages)
			}
		}
		got, _ := e.lister(e.bucket).listed(7)
		e.same("one bucket", got, want)
		got, _ = e.lister(e.bucket, e.bucket+"-nosuch").listed(0)
		e.same("a bucket that does not exist", got, want)

		id, err := volume.ParseID(want[3])
		if err != nil {
			t.Fatal(err)
		}
		p.grown(id, 77)
		if v, err := l.Get(e.ctx(), id); err != nil || v.ID != id || v.CapacityBytes != 77 {
			t.Errorf("Get: %+v, %v", v, err)
		}
		ownID, _ := volume.ParseID(own)
		p.grown(ownID, 78)
		if v, err := l.Get(e.ctx(), ownID); err != nil || v.ID != ownID || v.CapacityBytes != 78 {
			t.Errorf("Get: %+v, %v", v, err)
		}
		p.delete(id)
		p.delete(ownID)
		for _, gone := range []volume.ID{id, ownID, {Backend: "lab", Bucket: e.bucket, Prefix: "another-clusters/"}} {
			_, err = l.Get(e.ctx(), gone)
			e.want(err, fault.NotFound)
		}
	})
}

// The number of requests does not depend on the objects in the bucket.
func TestListingIsNotAffectedByOtherObjects(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		for i := range 5 {
			p.create(fmt.Sprint("v", i))
		}
		requests := func() []string {
			l := e.lister(e.bucket)
			l.listed(0) // what is found out once
			l.hooks.reset()
			if got, _ := l.listed(0); len(got) != 5 {
				t.Errorf("listed %q", got)
			}
			sent := l.hooks.sent()
			slices.Sort(sent)
			return sent
		}
		before := requests()
		e.put(numbered("data/", 1100)...)  // more than a page of a listing
		e.put(numbered(".data/", 1100)...) // as many that sort before the records
		e.same("requests", requests(), before)
		if len(before) != 1+1+5 { // tags, records, and each of them
			t.Errorf("requests: %q", before)
		}
	})
}

// An inventory has the volumes and snapshots of all owners in all states, and what cannot be read.
func TestInventory(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		source := p.create("source")
		e.put(source.Prefix + "a")
		p.snapshot("s", source)
		own := p.create(e.bucket+"-own", "bucketName", "")
		e.process(cluster("other")).create("another-clusters")
		p.delete(p.create("deleted"))
		e.put(".s3-csi/volumes/garbage")
		p.create("based", "prefix", "base/")

		found, unread, err := e.lister(e.bucket+"*").Inventory(e.ctx(), "")
		if err != nil || len(unread) > 0 {
			t.Fatal(unread, err)
		}
		var got []string
		for _, v := range found {
			text := fmt.Sprintf("%s %s %s %s", v.Kind, v.Name, v.State, v.Owner.Cluster)
			if v.Err != nil {
				text = fmt.Sprintf("%s %s unreadable", v.Kind, v.Key)
			}
			if v.Misplaced() {
				text += " misplaced"
			}
			got = append(got, text)
		}
		slices.Sort(got)
		want := []string{
			"reservation base base test", "snapshot s ready test", "volume .s3-csi/volumes/garbage unreadable", "volume another-clusters active other",
			"volume based active test", "volume deleted deleted test", "volume " + e.bucket + "-own active test", "volume source active test",
		}
		slices.Sort(want)
		e.same("entries", got, want)

		// A backend whose credentials are in secrets, and a bucket that cannot be read, are named.
		found, unread, err = p.Inventory(e.ctx(), "lab")
		if err != nil || len(found) > 0 || len(unread) != 1 || unread[0].Backend != "lab" {
			t.Errorf("%v, %v, %v", found, unread, err)
		}
		l := e.lister(e.bucket)
		l.refuse(403, "AccessDenied", "ListObjectsV2")
		if _, unread, err = l.Inventory(e.ctx(), ""); err != nil || len(unread) != 1 || unread[0].Bucket != e.bucket || !fault.Is(unread[0].Err,
			fault.Denied) {
			t.Errorf("%v, %v", unread, err)
		}
		_, _, err = l.Inventory(e.ctx(), "nosuch")
		if err == nil {
			t.Error("a backend that is not configured has an inventory")
		}
		p.delete(own)
	})
}
