package mount

// Condition is an adverse condition of a volume or a backend.
type Condition struct {
	Inaccessible bool   // false: degraded
	Reason       string // one of Reason…
	Message      string
}

// Reasons of conditions, in the form of the CSI specification.
const (
	ReasonStale              = "StaleMount"         // the client has exited, or a target does not show its file system
	ReasonUnresponsive       = "ClientUnresponsive" // the client does not answer
	ReasonNoClient           = "NoClient"           // no client in the user's pod serves the volume
	ReasonDraining           = "Draining"           // the client finishes its uploads
	ReasonHelperExited       = "HelperExited"       // the client serves, and its credentials are not renewed
	ReasonCredentialsExpired = "CredentialsExpired" // the session is over
	ReasonCredentialsRefused = "CredentialsRefused" // the service does not accept the credentials
	ReasonBackendUnreachable = "BackendUnreachable" // the service does not answer
)
