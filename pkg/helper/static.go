package helper

import (
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// The variables from which clients that cannot use the credential endpoint read keys (AWS SDKs and Tools Reference Guide, "AWS access keys").
const (
	envAccessKeyID     = "AWS_ACCESS_KEY_ID"
	envSecretAccessKey = "AWS_SECRET_ACCESS_KEY" //nolint:gosec // a variable's name
)

// clientCredentials returns the variables with which a client gets credentials: the credential endpoint, or the keys themselves. Call
// under mu.
//
// A client with static keys cannot get others while it runs. So keys that expire are refused: its mount would fail when they do.
func (h *helper) clientCredentials(c client.Command) ([]string, error) {
	if !c.StaticKeys {
		h.scrub.hold(h.options.now(), "client")
		return h.endpoint.env(), nil
	}
	keys := h.session.keys
	switch {
	case keys.IsZero():
		return nil, fault.Errorf(fault.Unauthenticated, "the client takes static keys, and there are none")
	case keys.SessionToken != "" || !keys.Expires.IsZero() || !h.session.order.IsZero():
		return nil, fault.Errorf(fault.Precondition, "the client takes static keys, and these are of a session, which expires")
	}
	// Its own: it keeps them when the helper gets others.
	h.scrub.hold(h.options.now(), "client", keys.SecretAccessKey)
	return append(noOtherSources(), envAccessKeyID+"="+keys.AccessKeyID, envSecretAccessKey+"="+keys.SecretAccessKey), nil
}
