// Package controller tests pkg/provision against real S3 servers: each promise of the controller's engine, on an embedded
// versitygw and on MinIO, which differ in just what the engine must find out.
package controller
