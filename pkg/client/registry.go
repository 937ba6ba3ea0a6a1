package client

// Registry finds clients by the names that volumes give.
type Registry struct {
	Get     func(name string) (Client, error) // the function Get
	Default string                            // the client of volumes that name none
}

// Of returns the client of that name; "" is the default one.
func (r Registry) Of(name string) (Client, error) {
	if name == "" {
		name = r.Default
	}
	return r.Get(name)
}
