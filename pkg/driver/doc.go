// Package driver is the edge of the driver: command line, gRPC server, and the CSI services.
//
// The services validate a request, call one interface and return plain errors. What an error means to a CO is decided
// in errors.go alone; what a log may show of a request is decided by pkg/redact alone. Everything that touches S3 or a
// mount table is behind the interfaces that controller.go and node.go declare.
package driver
