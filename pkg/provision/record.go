package provision

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// recordVersion is the form of the records that this version writes, and the only one that it reads.
	recordVersion = 1
	// maxRecord bounds a record in bytes; the longest possible one is below 2 KiB.
	maxRecord = 8 << 10

	recordsPrefix = volume.RecordPrefix + "/volumes/"
	probesPrefix  = volume.RecordPrefix + "/probe/"
)

// state is where a volume's name is in its life.
type state string

const (
	stateActive   state = "active"
	stateDeleting state = "deleting"
	// stateDeleted is a tombstone: the volume is gone, and its name goes on with the next generation.
	stateDeleted state = "deleted"
	// stateBase reserves a name that is a directory of a base prefix: no volume can have it.
	stateBase state = "base"
	// stateGone is no state of a record: there is nothing to be deleted.
	stateGone state = ""
)

// record proves that this driver made a prefix volume, and with what parameters. It is data, never authority: no backend,
// bucket or prefix is ever taken from it. A reservation (stateBase) has only an owner, its name and times.
type record struct {
	Version          int             `json:"version"`
	Driver           string          `json:"driver"`
	Cluster          string          `json:"cluster"`
	Name             string          `json:"name"` // the volume's, as the CO gave it
	VolumeID         string          `json:"volumeID,omitempty"`
	ParametersDigest string          `json:"parametersDigest,omitempty"`
	OnDelete         volume.OnDelete `json:"onDelete,omitempty"`
	State            state           `json:"state"`
	Generation       int             `json:"generation,omitempty"`
	// FirstPrefix is where generation 1 was. It is the only one that can lie around a base prefix (base.go), and a later
	// generation may be in another place.
	FirstPrefix string `json:"firstPrefix,omitempty"`
	// PreviousVolumeID is that of the generation before, for late retries of its deletion.
	PreviousVolumeID string    `json:"previousVolumeID,omitempty"`
	Created          time.Time `json:"created"` // this generation
	Updated          time.Time `json:"updated"`
}

// recordKey is where the record of the volume name with that segment is.
func recordKey(segment string) string { return recordsPrefix + segment }

func (r record) owner() owner { return owner{driver: r.Driver, cluster: r.Cluster} }

// outlived tells whether the volume with that id had this name before, and was deleted.
func (r record) outlived(id volume.ID) bool {
	if r.State == stateBase || r.Generation == 1 {
		return false
	}
	first := id
	first.Prefix = r.FirstPrefix
	return id.String() == r.PreviousVolumeID || id == first
}

// with is the record in another state.
func (r record) with(s state, now time.Time) record {
	r.State, r.Updated = s, now
	return r
}

func (r record) encode() ([]byte, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	data, err := json.MarshalIndent(r, "", "  ")
	return append(data, '\n'), err
}

// decodeRecord reads a record strictly: what is not exactly of the form that this version writes is an error.
func decodeRecord(data []byte) (record, error) {
	if len(data) > maxRecord {
		return record{}, fmt.Errorf("it has more than %d bytes", maxRecord)
	}
	if !utf8.Valid(data) { // encoding/json would replace what is not UTF-8, and two names could become one
		return record{}, errors.New("it is not UTF-8")
	}
	var form struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &form); err != nil {
		return record{}, err
	}
	if form.Version != recordVersion {
		return record{}, fmt.Errorf("it has version %d, this driver knows %d: another version of the driver wrote it", form.Version, recordVersion)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	var r record
	if err := d.Decode(&r); err != nil {
		return record{}, err
	}
	if _, err := d.Token(); err != io.EOF {
		return record{}, errors.New("something follows the JSON object")
	}
	return r, r.check()
}

// check tells whether the record makes sense.
func (r record) check() error {
	switch {
	case r.Version != recordVersion:
		return fmt.Errorf("version %d", r.Version)
	case r.Driver == "":
		return errors.New("it names no driver")
	case r.Name == "" || !utf8.ValidString(r.Name):
		return fmt.Errorf("the name %q is empty or not UTF-8", r.Name)
	case r.Created.IsZero() || r.Updated.IsZero():
		return errors.New("a time is missing")
	}
	if r.State == stateBase {
		if r.VolumeID != "" || r.ParametersDigest != "" || r.OnDelete != "" || r.Generation != 0 || r.FirstPrefix != "" || r.PreviousVolumeID != "" {
			return errors.New("a reservation describes a volume")
		}
		return nil
	}
	return r.checkVolume()
}

func (r record) checkVolume() error {
	switch r.State {
	case stateActive, stateDeleting, stateDeleted:
	default:
		return fmt.Errorf("the state %q is unknown", r.State)
	}
	switch r.OnDelete {
	case volume.OnDeleteDelete, volume.OnDeletePurge, volume.OnDeleteRetain, volume.OnDeleteRequireEmpty:
	default:
		return fmt.Errorf("onDelete %q is unknown", r.OnDelete)
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
		return errors.New("the digest of the parameters is missing")
	case r.Generation == 1 && r.FirstPrefix != id.Prefix:
		return fmt.Errorf("the first prefix %q is not that of the volume id %q", r.FirstPrefix, r.VolumeID)
	case !strings.HasSuffix(r.FirstPrefix, "/"):
		return fmt.Errorf(`the first prefix %q does not end in "/"`, r.FirstPrefix)
	case (r.PreviousVolumeID == "") != (r.Generation == 1):
		return fmt.Errorf("generation %d follows %q", r.Generation, r.PreviousVolumeID)
	}
	return nil
}
