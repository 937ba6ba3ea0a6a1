// Package chart proves that the Helm chart, the manifests of deploy/ that are rendered from it, their documents and the driver
// say the same, and that what is rendered gives nobody more than it needs.
//
// It renders every file of testdata/ with the helm of HELM, and builds the overlays with the kubectl of KUBECTL or the one
// beside that helm. Nothing of it needs a cluster.
package chart
