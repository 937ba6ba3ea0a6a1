package main

import (
	"context"

	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

// showStatus prints what runs on this node. The driver on the node is asked; nothing else is.
func showStatus(ctx context.Context, o driver.Options, out output) int {
	ns, err := host.NewNamespace()
	if err != nil {
		return out.fail(err)
	}
	document, err := status.Fetch(ctx, ns, state.Paths{Dir: o.Node.StateDir}.StatusSocket())
	if err != nil {
		return out.fail(err)
	}
	if o.Status.Output == driver.OutputJSON && o.Status.Pod == "" { // also of another version
		return out.print(string(document))
	}
	d, err := status.Parse(document)
	if err != nil {
		return out.fail(err)
	}
	if o.Status.Pod != "" {
		d = d.Of(o.Status.Pod)
	}
	switch o.Status.Output {
	case driver.OutputJSON:
		err = d.JSON(out.stdout)
	case driver.OutputName:
		err = d.Names(out.stdout)
	default:
		err = d.Text(out.stdout, o.Status.ClientOutput)
	}
	if err != nil {
		return exitFailure
	}
	return exitOK
}
