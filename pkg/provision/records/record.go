// Package records reads and writes the proof that this driver created a volume: the record object of a prefix volume, and the tags of a
// bucket volume. Its callers decide what they mean.
package records

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// version is the format of records. No other version is accepted.
	version = 1
	// maxRecord is the maximum size of a record, in bytes; the longest possible one is below 2 KiB.
	maxRecord = 8 << 10
)

// State is the state of a volume's name.
type State string

// States of records and tags.
const (
	StateActive   State = "active"
	StateDeleting State = "deleting"
	// StateDeleted is a tombstone: the volume is deleted, and the next one of its name gets another generation.
	StateDeleted State = "deleted"
	// StateFilling is before the content of a new volume is complete.
	StateFilling State = "filling"
	// StateReserved is for a name that is a directory of a base prefix, so no volume can have it.
	StateReserved State = "base"
)

// Record proves that this driver created a prefix volume with certain parameters. Its content is never trusted: no backend, bucket or
// prefix is ever taken from it. A reservation (StateReserved) has only an owner, its name and times.
type Record struct {
	Version          int             `json:"version"`
	Driver           string          `json:"driver"`
	Cluster          string          `json:"cluster"`
	Name             string          `json:"name"` // the volume's, as the CO gave it
	VolumeID         string          `json:"volumeID,omitempty"`
	ParametersDigest string          `json:"parametersDigest,omitempty"`
	OnDelete         volume.OnDelete `json:"onDelete,omitempty"`
	// CapacityBytes is the size that was asked for, at creation or by an expansion. 0: none, or an earlier driver created the volume.
	CapacityBytes int64 `json:"capacityBytes,omitempty"`
	// Usage is a volume.Usage in its text form, which nodes read.
	Usage string `json:"usage,omitempty"`
	// Options are the mount options of the volume that also apply to the driver's requests, see backend.RequestOptions.
	Options    []string `json:"options,omitempty"`
	State      State    `json:"state"`
	Generation int      `json:"generation,omitempty"`
	// FirstPrefix is the prefix of generation 1, the only generation that can contain a base prefix. Later ones may have another prefix.
	FirstPrefix string `json:"firstPrefix,omitempty"`
	// ContentSource is the volume.Content of a volume that was created from a snapshot or another volume.
	ContentSource string `json:"contentSource,omitempty"`
	// Fillers are the claims of the runs that may still copy content into a volume that is not filled yet, in the order in which they took over. The
	// last one fills the volume.
	Fillers []string `json:"fillers,omitempty"`
	// Direct is set if the volume is the snapshot in ContentSource itself.
	Direct bool `json:"direct,omitempty"`
	// PreviousVolumeID is the volume id of the previous generation, for late retries of its deletion.
	PreviousVolumeID string    `json:"previousVolumeID,omitempty"`
	Created          time.Time `json:"created"` // this generation
	Updated          time.Time `json:"updated"`
}

// Key returns the object key of the record of the volume name with that segment.
func Key(segment string) string { return volume.RecordPrefix + "/volumes/" + segment }

// New returns the record of a new volume, in its first generation unless the id says otherwise.
func (s *Store) New(name string, id volume.ID, params volume.Parameters) Record {
	now := s.Now()
	_, generation, _ := id.NameSegment()
	state, content := StateActive, params.Content.String()
	if content != "" {
		state = StateFilling
	}
	return Record{
		Version: version, Driver: s.Owner.Driver, Cluster: s.Owner.Cluster, Name: name, VolumeID: id.String(), ParametersDigest: params.Digest(),
		OnDelete: params.OnDelete, CapacityBytes: params.CapacityBytes, Usage: params.Usage.String(), State: state, Generation: generation, FirstPrefix: id.Prefix,
		ContentSource: content, Direct: params.Node.Snapshot != "", Created: now, Updated: now,
	}
}

// NewReservation returns a record that reserves a name, so that no volume can use it.
func (s *Store) NewReservation(name string) Record {
	now := s.Now()
	return Record{Version: version, Driver: s.Owner.Driver, Cluster: s.Owner.Cluster, Name: name, State: StateReserved, Created: now, Updated: now}
}

// UsageSetting returns how often usage is measured.
func (r Record) UsageSetting() (volume.Usage, error) {
	if r.Usage == "" {
		return 0, nil
	}
	return volume.ParseUsage(r.Usage)
}

// For returns the backend with the settings that the volume has for the driver's requests.
func (r Record) For(be backend.Backend) backend.Backend {
	options, err := volume.ParseMountOptions(r.Options, "options")
	if err != nil { // a record that was read is valid
		return be
	}
	return be.For(options)
}

// Owner returns the owner that the record names.
func (r Record) Owner() Owner { return Owner{Driver: r.Driver, Cluster: r.Cluster} }

// Outlived reports whether the volume with that id is a deleted earlier generation of this name.
func (r Record) Outlived(id volume.ID) bool {
	if r.State == StateReserved || r.Generation == 1 {
		return false
	}
	first := id
	first.Prefix = r.FirstPrefix
	return id.String() == r.PreviousVolumeID || id == first
}

// With returns the record in another state.
func (r Record) With(s State, now time.Time) Record {
	r.State, r.Updated = s, now
	if s != StateFilling && s != StateDeleting {
		r.Fillers = nil
	}
	return r
}

// encode returns the text of a record that is valid, which is what invalid says; nil: it is.
func encode(record any, invalid error) ([]byte, error) {
	data, err := json.MarshalIndent(record, "", "  ")
	if err = cmp.Or(invalid, err); err != nil {
		return nil, fault.Errorf(fault.Unknown, "record that is not valid: %w", err)
	}
	return append(data, '\n'), nil
}

// decode parses a record strictly: any difference from the format is an error.
func decode(data []byte) (Record, error) {
	var r Record
	if err := parse(data, &r); err != nil {
		return Record{}, err
	}
	return r, r.check()
}

// parse parses a JSON object of this version strictly.
func parse(data []byte, into any) error {
	if len(data) > maxRecord {
		return fmt.Errorf("more than %d bytes", maxRecord)
	}
	if !utf8.Valid(data) { // encoding/json would replace what is not UTF-8, and two names could become one
		return errors.New("not UTF-8")
	}
	var form struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &form); err != nil {
		return err
	}
	if form.Version != version {
		return fmt.Errorf("version %d, this driver reads version %d: another version of the driver wrote it", form.Version, version)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("data after the JSON object")
	}
	return nil
}

// check returns an error if the record is inconsistent.
func (r Record) check() error {
	switch {
	case r.Version != version:
		return fmt.Errorf("version %d", r.Version)
	case r.Driver == "":
		return errors.New("driver is missing")
	case r.Name == "" || !utf8.ValidString(r.Name):
		return fmt.Errorf("the name %q is empty or not UTF-8", r.Name)
	case r.Created.IsZero() || r.Updated.IsZero():
		return errors.New("created or updated is missing")
	}
	if r.State == StateReserved {
		if r.VolumeID != "" || r.ParametersDigest != "" || r.OnDelete != "" || r.CapacityBytes != 0 || r.Generation != 0 || r.FirstPrefix != "" ||
			r.PreviousVolumeID != "" ||
			r.ContentSource != "" || len(r.Fillers) > 0 || r.Direct || r.Usage != "" || len(r.Options) > 0 {
			return errors.New("a reservation has fields of a volume")
		}
		return nil
	}
	return r.checkVolume()
}

func (r Record) checkVolume() error {
	switch r.State {
	case StateActive, StateFilling, StateDeleting, StateDeleted:
	default:
		return fmt.Errorf("unknown state %q", r.State)
	}
	if r.ContentSource != "" || r.State == StateFilling || r.Direct {
		if _, err := volume.ParseContent(r.ContentSource); err != nil {
			return err
		}
	}
	switch r.OnDelete {
	case volume.OnDeleteDelete, volume.OnDeletePurge, volume.OnDeleteRetain, volume.OnDeleteRequireEmpty:
	default:
		return fmt.Errorf("unknown onDelete %q", r.OnDelete)
	}
	if _, err := r.UsageSetting(); err != nil {
		return err
	}
	if _, err := volume.ParseMountOptions(r.Options, "options"); err != nil {
		return err
	}
	id, err := volume.ParseID(r.VolumeID)
	if err != nil {
		return err
	}
	segment, generation, ok := id.NameSegment()
	switch {
	case !ok || segment != volume.NameSegment(r.Name) || generation != r.Generation:
		return fmt.Errorf("the volume id %q is not that of generation %d of the name %q", r.VolumeID, r.Generation, r.Name)
	case r.ParametersDigest == "":
		return errors.New("parametersDigest is missing")
	case r.CapacityBytes < 0:
		return fmt.Errorf("the capacity %d is negative", r.CapacityBytes)
	case r.Generation == 1 && r.FirstPrefix != id.Prefix:
		return fmt.Errorf("the first prefix %q is not that of the volume id %q", r.FirstPrefix, r.VolumeID)
	case !strings.HasSuffix(r.FirstPrefix, "/"):
		return fmt.Errorf(`the first prefix %q does not end in "/"`, r.FirstPrefix)
	case (r.PreviousVolumeID == "") != (r.Generation == 1):
		return fmt.Errorf("generation %d follows %q", r.Generation, r.PreviousVolumeID)
	}
	return nil
}
