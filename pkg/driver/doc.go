// Package driver contains the command line, the gRPC server and the CSI services.
//
// The services validate a request, call one interface and return plain errors. Only errors.go maps errors to gRPC codes, and only
// pkg/redact decides what a log may show of a request. S3 and mounts are accessed through the interfaces in controller.go and node.go.
package driver
