package driver

import (
	"cmp"
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
	pageClients       = "docs/reference/errors.md#publishing-clients-and-the-node"
	pagePodStarts     = "docs/how-to/troubleshooting.md#a-pod-does-not-start"
	pageUnpublish     = "docs/reference/errors.md#unpublishing"
)

// defaultPage returns the page for a method's errors of a kind; "": there is none.
func defaultPage(method string, kind fault.Kind) string {
	input := kind == fault.Invalid || kind == fault.Unsupported
	switch method {
	case csi.Node_NodePublishVolume_FullMethodName:
		switch {
		case input:
			return pageParameters
		case kind == fault.Denied || kind == fault.Unauthenticated:
			return credentials.Page
		case kind == fault.Precondition:
			return pageClients
		}
		return pagePodStarts
	case csi.Node_NodeUnpublishVolume_FullMethodName:
		return pageUnpublish
	case csi.Controller_CreateSnapshot_FullMethodName, csi.Controller_DeleteSnapshot_FullMethodName:
		if input {
			return pageSnapshotClass
		}
		return pageSnapshots
	}
	switch {
	case !mutates(method):
		return ""
	case input:
		return pageParameters
	}
	return pageCreateDelete
}

// pageOf returns the end of an error's text with the page that explains it, or "" where there is none or the text names one.
func pageOf(method string, err error) string {
	page := defaultPage(method, fault.KindOf(err))
	if page == "" || strings.Contains(err.Error(), "see docs/") {
		return ""
	}
	return "; see " + cmp.Or(fault.PageOf(err), page)
}
