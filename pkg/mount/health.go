package mount

// Health is the result of a health check of a mount.
type Health int

const (
	Down     Health = iota // its client has exited, or its file system is gone
	Healthy                // its client serves
	Outdated               // healthy, but started for an older configuration of the backend
	Orphaned               // its client serves, but its helper, which ends it and renews its credentials, has exited
)

// Serves reports whether the client serves, and its helper can be reached.
func (h Health) Serves() bool { return h == Healthy || h == Outdated }
