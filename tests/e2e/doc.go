// Package e2e holds the tests of the driver in a real Kubernetes: deployed by its chart, with the real external-provisioner and external-snapshotter, and used
// by PersistentVolumeClaims and pods. What is started, and what of it stands in for something else, is in main_test.go.
package e2e
