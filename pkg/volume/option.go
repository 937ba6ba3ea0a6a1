package volume

// Option is one mount option as its author wrote it in a StorageClass or PersistentVolume: "allow-delete" or
// "uid=1000", with or without leading dashes, or separated by one space as "--uid 1000".
type Option struct {
	Name  string // without leading dashes
	Value string // meaningful if HasValue
	// HasValue tells "name=" apart from "name".
	HasValue bool
}
