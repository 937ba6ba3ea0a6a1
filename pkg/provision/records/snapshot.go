package records

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// States of snapshot records, beside StateDeleting and StateDeleted.
const (
	// StateCutting is before anything is copied.
	StateCutting State = "cutting"
	StateCopying State = "copying"
	StateReady   State = "ready"
)

// Snapshot proves that this driver made a snapshot. Like a Record, its content is never trusted: no backend, bucket or prefix is taken from
// it.
type Snapshot struct {
	Version          int             `json:"version"`
	Driver           string          `json:"driver"`
	Cluster          string          `json:"cluster"`
	Name             string          `json:"name"` // the snapshot's, as the CO gave it
	SnapshotID       string          `json:"snapshotID"`
	Source           string          `json:"source"` // volume id
	ParametersDigest string          `json:"parametersDigest"`
	Consistency      string          `json:"consistency"`
	OnDelete         volume.OnDelete `json:"onDelete"`
	State            State           `json:"state"`
	Generation       int             `json:"generation"`
	// Objects and Bytes are expected while the snapshot is copied, and exact when it is ready. Changed is how many objects changed meanwhile.
	Objects int64 `json:"objects"`
	Bytes   int64 `json:"bytes"`
	Changed int64 `json:"changed,omitempty"`
	// Makers are the claims of the runs that may still write objects of a snapshot that is not ready, in the order in which they took over. The last
	// one makes the snapshot.
	Makers []string `json:"makers,omitempty"`
	// Failure is why a snapshot is deleted that could not be made.
	Failure string `json:"failure,omitempty"`
	// Cut is the time that the snapshot shows, if its consistency is time. Planned is set when all versions to copy are in the plan.
	Cut      time.Time `json:"cut,omitzero"`
	Planned  bool      `json:"planned,omitempty"`
	Created  time.Time `json:"created"` // when the copy began
	Finished time.Time `json:"finished,omitzero"`
	Updated  time.Time `json:"updated"`
}

// SnapshotKey returns the object key of the record of the snapshot name with that segment.
func SnapshotKey(segment string) string { return volume.SnapshotsPrefix + segment }

// NewSnapshot returns the record of a snapshot that is about to be copied.
func (s *Store) NewSnapshot(name string, id volume.SnapshotID, source volume.ID, p volume.SnapshotParameters) Snapshot {
	now := s.Now()
	return Snapshot{
		Version: version, Driver: s.Owner.Driver, Cluster: s.Owner.Cluster, Name: name, SnapshotID: id.String(), Source: source.String(),
		ParametersDigest: p.Digest(),
		Consistency:      p.Consistency, OnDelete: p.OnDelete, State: StateCutting, Generation: id.Generation, Created: now, Updated: now,
	}
}

// Owner returns the owner that the record names.
func (s Snapshot) Owner() Owner { return Owner{Driver: s.Driver, Cluster: s.Cluster} }

// With returns the record in another state.
func (s Snapshot) With(state State, now time.Time) Snapshot {
	s.State, s.Updated = state, now
	if state == StateReady || state == StateDeleted {
		s.Makers = nil
	}
	return s
}

func (s Snapshot) check() error {
	switch {
	case s.Version != version:
		return fmt.Errorf("version %d", s.Version)
	case s.Driver == "":
		return errors.New("driver is missing")
	case s.Name == "" || !utf8.ValidString(s.Name):
		return fmt.Errorf("the name %q is empty or not UTF-8", s.Name)
	case s.Created.IsZero() || s.Updated.IsZero():
		return errors.New("created or updated is missing")
	case s.ParametersDigest == "":
		return errors.New("parametersDigest is missing")
	case s.Objects < 0 || s.Bytes < 0:
		return errors.New("negative counts")
	case s.State == StateReady && s.Finished.IsZero():
		return errors.New("finished is missing")
	case s.Consistency == volume.SnapshotTime && s.Cut.IsZero():
		return errors.New("cut is missing")
	}
	switch s.State {
	case StateCutting, StateCopying, StateReady, StateDeleting, StateDeleted:
	default:
		return fmt.Errorf("unknown state %q", s.State)
	}
	switch s.OnDelete {
	case volume.OnDeleteDelete, volume.OnDeletePurge, volume.OnDeleteRetain:
	default:
		return fmt.Errorf("unknown onDelete %q", s.OnDelete)
	}
	id, err := volume.ParseSnapshotID(s.SnapshotID)
	if err != nil {
		return err
	}
	if id.Segment != volume.NameSegment(s.Name) || id.Generation != s.Generation {
		return fmt.Errorf("the snapshot id %q is not that of generation %d of the name %q", s.SnapshotID, s.Generation, s.Name)
	}
	_, err = volume.ParseID(s.Source)
	return err
}

func decodeSnapshot(data []byte) (Snapshot, error) {
	var s Snapshot
	if err := parse(data, &s); err != nil {
		return Snapshot{}, err
	}
	return s, s.check()
}

// StoredSnapshot is a snapshot record as it was read.
type StoredSnapshot struct {
	Snapshot
	ETag string
}

// ReadSnapshot reads a snapshot record. NotFound: there is none. Precondition: the object is not a valid record.
func (s *Store) ReadSnapshot(ctx context.Context, b buckets.Bucket, segment string) (StoredSnapshot, error) {
	r, etag, err := readRecord(ctx, b, SnapshotKey(segment), decodeSnapshot)
	return StoredSnapshot{r, etag}, err
}
