// Package faults holds the tests of what is done to a node at the worst moments: programs that are killed, a systemd or a
// message bus that is restarted, at every step of the driver's work; an S3 service that is slow or away; a host that is
// switched off.
package faults
