// Package node proves the promises of the CSI Node service on real mounts: a real driver, real clients, a real S3 server
// and whatever goes wrong between them.
//
// Tests run beside others, but for those that hold the driver to its times, and those about what all mounts of a host share, or that change the host.
package node
