// Package node proves the promises of the CSI Node service on real mounts: a real driver, real clients, a real S3 server
// and whatever goes wrong between them.
package node
