package provision

import (
	"sync"
	"time"
)

// How much is remembered. What falls out is found out again.
const (
	knownBuckets = 1024
	knownBases   = 1024 // of a bucket; a template of namespaces makes one each
	// baseTTL bounds how long a reservation is believed to be there after somebody emptied the bucket by other means.
	baseTTL = time.Hour
)

// bucketID names a bucket in this process; backend is a revision.
type bucketID struct{ backend, bucket string }

// uploadListing is how unfinished uploads below a prefix can be found.
type uploadListing int

const (
	uploadsUnknown uploadListing = iota
	uploadsByPrefix
	uploadsWide // the service matches only whole keys: list all, and filter
	uploadsNone // the service does not tell
)

// facts are what was found out about a bucket once and does not change.
type facts struct {
	shared      bool // it is not a bucket volume
	proven      bool // conditional is known
	conditional bool
	uploads     uploadListing
	bases       map[string]time.Time // when a base prefix was reserved
}

// knowledge remembers facts.
type knowledge struct {
	now     func() time.Time
	mu      sync.Mutex
	buckets map[bucketID]*facts
}

func newKnowledge(now func() time.Time) *knowledge {
	return &knowledge{now: now, buckets: map[bucketID]*facts{}}
}

// see reads the facts of a bucket.
func (k *knowledge) see(id bucketID, read func(*facts)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.buckets[id]
	if f == nil {
		if len(k.buckets) >= knownBuckets {
			clear(k.buckets)
		}
		f = &facts{bases: map[string]time.Time{}}
		k.buckets[id] = f
	}
	read(f)
}

func (k *knowledge) forget(id bucketID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.buckets, id)
}

func (k *knowledge) reserved(id bucketID, base string) (ok bool) {
	k.see(id, func(f *facts) {
		at, known := f.bases[base]
		ok = known && k.now().Sub(at) < baseTTL
	})
	return ok
}

func (k *knowledge) reserve(id bucketID, base string) {
	k.see(id, func(f *facts) {
		if len(f.bases) >= knownBases {
			clear(f.bases)
		}
		f.bases[base] = k.now()
	})
}
