package client

import (
	"encoding/json"
	"slices"
	"strings"
)

const (
	// maxReport is the most bytes of a report; maxRequests is that of requests, which name operations.
	maxReport = 128
	// maxUnstored is the most bytes of a report of files that are not stored, and maxUnstoredFiles of such files.
	maxUnstored      = 3 << 10
	maxUnstoredFiles = 1 << 20
	maxRequests      = 4 << 10
	// maxOperations is the most operations of one report, and maxOperation the most letters of a name.
	maxOperations = 32
	maxOperation  = 40
)

// Queue is a client's upload queue: files that are closed and not uploaded yet.
type Queue struct {
	Uploads int   `json:"uploads"` // files
	Bytes   int64 `json:"bytes"`
}

// Requests counts a client's requests to its S3 service since it was started.
type Requests struct {
	Read       int64                `json:"read"`       // bytes of objects
	Written    int64                `json:"written"`    // bytes of files
	Operations map[string]Operation `json:"operations"` // by the names of the S3 API; Other: several that the client does not tell apart
}

// Operation counts the requests of one kind.
type Operation struct {
	Requests int64 `json:"requests"`
	// Errors counts answers that are errors, but for those that an object is missing or a condition does not hold, and requests without
	// an answer. Throttles counts those of them that ask for fewer requests (429 and 503).
	Errors       int64    `json:"errors"`
	Throttles    int64    `json:"throttles"`
	Milliseconds int64    `json:"milliseconds"` // that they took together
	Latencies    [9]int64 `json:"latencies"`    // how many took up to 5, 25, 100, 250, 1000, 5000, 15000 and 60000 ms, and longer
}

// Unstored counts files that are not stored although their programs had no error when they closed them.
type Unstored struct {
	Files  int    `json:"files"`
	Name   string `json:"name"` // the key of one of them
	Reason string `json:"reason"`
}

// report parses a line of a prefix and the JSON of a valid report in exactly the format of encoding/json. Other lines, such as a log
// message with a file name, are not reports.
func report[R any](line, prefix string, limit int, valid func(R) bool) (none R, ok bool) {
	var r R
	text, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), prefix)
	if !ok || len(text) > limit || json.Unmarshal([]byte(text), &r) != nil {
		return none, false
	}
	if canonical, err := json.Marshal(r); err != nil || string(canonical) != text || !valid(r) {
		return none, false
	}
	return r, true
}

func parseQueue(line string) (Queue, bool) {
	return report(line, "s3-csi-queue ", maxReport, func(q Queue) bool { return q.Uploads >= 0 && q.Bytes >= 0 })
}

func parseRequests(line string) (Requests, bool) {
	return report(line, "s3-csi-requests ", maxRequests, func(r Requests) bool {
		for name, o := range r.Operations {
			counts := append(o.Latencies[:], o.Requests, o.Errors, o.Throttles, o.Milliseconds)
			if name == "" || len(name) > maxOperation || slices.Min(counts) < 0 {
				return false
			}
		}
		return r.Read >= 0 && r.Written >= 0 && len(r.Operations) <= maxOperations
	})
}

func parseUnstored(line string) (Unstored, bool) {
	return report(line, "s3-csi-unstored ", maxUnstored, func(u Unstored) bool { return u.Files >= 0 && u.Files <= maxUnstoredFiles })
}

type flushed struct {
	Unsent int `json:"unsent"`
}

// parseFlushed parses the number of changed files that were not uploaded by a flush.
func parseFlushed(line string) (unsent int, ok bool) {
	f, ok := report(line, "s3-csi-flushed ", maxReport, func(f flushed) bool { return f.Unsent >= 0 })
	return f.Unsent, ok
}

type conflicts struct {
	Files int `json:"files"`
}

// parseConflicts parses the number of quarantined files.
func parseConflicts(line string) (files int, ok bool) {
	c, ok := report(line, "s3-csi-conflicts ", maxReport, func(c conflicts) bool { return c.Files >= 0 })
	return c.Files, ok
}
