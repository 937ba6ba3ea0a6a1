package provision

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Volumes must not lie in each other: deleting the outer one would take the inner one along.
//
// A volume's prefix is <base><segment>/ or, from generation 2 on, <base><segment>@<n>/. If volume V lies around volume W, V's
// prefix is W's base prefix or an ancestor of it, because segments hold no "/" and two volumes with the same prefix would have
// the same record. Base prefixes hold no "@", so that V is of generation 1 and its segment is a directory name of W's base.
//
// So, before a base prefix is used, every directory name of it that can be a segment gets a reservation: a record of its own,
// written where none is. It takes the name away from all volumes, in every directory, and forever. The same conditional
// write decides the race between the reservation and a volume of that name: the loser sees the winner's record.
//
// Where a record is there already, it is harmless unless that name's generation 1 lies around the base: no other volume of that
// name can come without generation 2 or more. A tombstone counts like a volume: a deleter of generation 1 that was held up may
// still run, and would find W's data in its prefix. That is why records keep their first prefix.

//
// A volume whose own segment is a directory name of its base ("${pv.name}/") takes that name with its own record instead.

// reserveBase makes sure that no volume lies or will lie around the base prefix of the volume with that segment. Warm, it sends
// nothing.
func (p *Provisioner) reserveBase(ctx context.Context, pl place, base, segment string) error {
	names := reservedNames(base)
	all := !slices.Contains(names, segment)
	if len(names) == 0 || all && p.known.reserved(pl.id(), base) {
		return nil
	}
	for _, name := range names {
		if name == segment {
			continue
		}
		if err := p.reserveName(ctx, pl, base, name); err != nil {
			return err
		}
	}
	if all {
		p.known.reserve(pl.id(), base)
	}
	return nil
}

// reservedNames are the directory names of a base prefix that can be segments of volume names.
func reservedNames(base string) []string {
	var names []string
	seen := map[string]bool{}
	for name := range strings.SplitSeq(strings.TrimSuffix(base, "/"), "/") {
		// A hashed segment is no name's own segment, but it can be another name's.
		if _, _, ok := (volume.ID{Prefix: name + "/"}).NameSegment(); ok && !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	return names
}

func (p *Provisioner) reserveName(ctx context.Context, pl place, base, name string) error {
	for range maxRaces {
		found, err := p.readRecord(ctx, pl, name)
		switch {
		case err == nil:
			return aroundBase(found.record, base, pl)
		case !fault.Is(err, fault.NotFound):
			return err
		case backend.IsNoSuchBucket(err):
			return p.noBucket(pl, err)
		}
		now := p.now().UTC()
		err = p.writeRecord(ctx, pl, name, "", record{
			Version: recordVersion, Driver: p.owner.driver, Cluster: p.owner.cluster, Name: name, State: stateBase, Created: now, Updated: now,
		})
		if !errors.Is(err, errLost) {
			return err
		}
	}
	return fault.Errorf(fault.Busy, "the record of %q in %s keeps changing while the base prefix %q is reserved", name, pl, base)
}

// aroundBase tells whether the record is that of a volume that lies, or lay, around the base prefix.
func aroundBase(r record, base string, pl place) error {
	if r.State == stateBase || !strings.HasPrefix(base, r.FirstPrefix) {
		return nil
	}
	if r.State == stateDeleted || r.Generation > 1 {
		return fault.Errorf(fault.Precondition, "parameters.prefix: the base prefix %q in %s lies inside %q, where volume %q was before it was deleted: choose another prefix, because a deletion that was interrupted might go on there",
			base, pl, r.FirstPrefix, r.Name)
	}
	return fault.Errorf(fault.Precondition, "parameters.prefix: the base prefix %q in %s lies inside volume %q (%s): volumes cannot be nested, choose another prefix", base, pl, r.Name, r.VolumeID)
}

// noBucket is for a bucket that was there a moment ago.
func (p *Provisioner) noBucket(pl place, err error) error {
	p.forget(pl.be, pl.info.Name)
	return fault.Errorf(fault.Precondition, "parameters.bucketName: %s is not there: %w", pl, err)
}
