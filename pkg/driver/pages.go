package driver

import (
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Pages of the documentation that errors end with. tests/chart checks that they and their headings exist.
const (
	pageParameters    = "docs/reference/parameters.md"
	pageSnapshots     = "docs/explanation/snapshots.md"
	pageSnapshotClass = "docs/reference/parameters.md#parameters-of-a-volumesnapshotclass"
	pageCreateDelete  = "docs/reference/errors.md#creating-and-deleting-volumes"
	pageCredentials   = credentials.Page
	pageClients       = "docs/reference/errors.md#publishing-clients-and-the-node"
	pagePodStarts     = "docs/how-to/troubleshooting.md#a-pod-does-not-start"
	pageUnpublish     = "docs/reference/errors.md#unpublishing"
)

// pagesOf returns the pages for a method's errors by kind; other is the page of kinds that are not in the map, or "".
func pagesOf(method string) (pages map[fault.Kind]string, other string) {
	switch method {
	case csi.Node_NodePublishVolume_FullMethodName:
		return map[fault.Kind]string{
			fault.Invalid: pageParameters, fault.Unsupported: pageParameters,
			fault.Denied: pageCredentials, fault.Unauthenticated: pageCredentials, fault.Precondition: pageClients,
		}, pagePodStarts
	case csi.Node_NodeUnpublishVolume_FullMethodName:
		return nil, pageUnpublish
	case csi.Controller_CreateVolume_FullMethodName, csi.Controller_DeleteVolume_FullMethodName,
		csi.Controller_ControllerExpandVolume_FullMethodName, csi.Controller_ControllerModifyVolume_FullMethodName:
		return map[fault.Kind]string{fault.Invalid: pageParameters, fault.Unsupported: pageParameters}, pageCreateDelete
	case csi.Controller_CreateSnapshot_FullMethodName, csi.Controller_DeleteSnapshot_FullMethodName:
		return map[fault.Kind]string{fault.Invalid: pageSnapshotClass, fault.Unsupported: pageSnapshotClass}, pageSnapshots
	}
	return nil, ""
}

// pageOf returns the end of an error's text with the page that explains it, or "" where there is none or the text names one.
func pageOf(method string, err error) string {
	if strings.Contains(err.Error(), "see docs/") {
		return ""
	}
	pages, page := pagesOf(method)
	if specific, ok := pages[fault.KindOf(err)]; ok {
		page = specific
	}
	if own := fault.PageOf(err); own != "" && page != "" {
		page = own
	}
	if page == "" {
		return ""
	}
	return "; see " + page
}
