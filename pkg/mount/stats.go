package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// Stats tells what the file system of a publication says of its size. The answer comes from the client, so it is waited
// for only until ctx ends.
func (m *Manager) Stats(ctx context.Context, volumeID, path string) (Stats, error) {
	path = m.real(path)
	var (
		p  publication
		ok bool
	)
	err := m.do(ctx, func() (err error) {
		p, ok, err = m.store.publication(path)
		return err
	})
	if err != nil {
		return Stats{}, err
	}
	if !ok || p.VolumeID != volumeID {
		return Stats{}, fault.Errorf(fault.NotFound, "volume %s is not published at %s on this node", volumeID, path)
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return Stats{}, err
	}
	top, ok := mountedAt(mounts, path)
	if name, ours := nameOfSource(top.Source); !ok || !ours || name != p.Mount {
		return Stats{}, fault.Errorf(fault.NotFound, "volume %s: the mount at %s is gone; publishing it again brings it back", volumeID, path)
	}
	st, err := m.Namespace.Statfs(host.For(ctx, account(top.Source)), path)
	switch {
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EIO):
		return Stats{}, fault.Errorf(fault.Unavailable, "volume %s at %s: its client has died: %w", volumeID, path, err)
	case errors.Is(err, fs.ErrNotExist):
		return Stats{}, fault.Errorf(fault.NotFound, "volume %s: %w", volumeID, err)
	case err != nil:
		return Stats{}, fmt.Errorf("volume %s at %s does not answer: %w", volumeID, path, err)
	}
	bytes := func(blocks uint64) int64 { return saturate(blocks, uint64(st.Frsize)) }
	return Stats{
		TotalBytes: bytes(st.Blocks), UsedBytes: bytes(st.Blocks - min(st.Blocks, st.Bfree)), AvailableBytes: bytes(st.Bavail),
		Inodes: saturate(st.Files, 1), InodesUsed: saturate(st.Files-min(st.Files, st.Ffree), 1), InodesFree: saturate(st.Ffree, 1),
	}, nil
}

// saturate multiplies within an int64: object stores like to say that they have 2^63 blocks.
func saturate(n, size uint64) int64 {
	const limit = uint64(1<<63 - 1)
	if size == 0 || n > limit/size {
		return int64(limit)
	}
	return int64(n * size)
}
