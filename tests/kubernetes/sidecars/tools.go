//go:build tools

// Package sidecars names the programs of Kubernetes SIG Storage that need a newer Kubernetes to compile than the one that the tests run.
package sidecars

import (
	_ "github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer"
	_ "github.com/kubernetes-csi/external-snapshotter/v8/cmd/csi-snapshotter"
	_ "github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller"
)
