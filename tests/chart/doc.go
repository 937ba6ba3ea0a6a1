// Package chart tests that the Helm chart, the manifests in deploy/, their documentation and the driver agree, and that rendered
// objects have no more permissions than needed.
//
// It renders every file of testdata/ with $HELM, and builds the overlays with $KUBECTL or the kubectl next to helm. It needs no
// cluster.
package chart
