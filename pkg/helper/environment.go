package helper

import (
	"encoding/base64"
	"strings"

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
		h.scrub.setSecrets(h.options.now(), "client")
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
	h.scrub.setSecrets(h.options.now(), "client", keys.SecretAccessKey)
	return append(noOtherSources(), envAccessKeyID+"="+keys.AccessKeyID, envSecretAccessKey+"="+keys.SecretAccessKey), nil
}

// proxy returns the variables of the command's environment that name a proxy, with the request's credentials for it. They are in no
// record, argument or log. Call under mu.
func (h *helper) proxy(req StartRequest) []string {
	_, password, _ := strings.Cut(req.ProxyCredentials, ":")
	h.scrub.setSecrets(h.options.now(), "proxy", req.ProxyCredentials, password, proxyHeader(req.ProxyCredentials))
	if req.ProxyCredentials == "" {
		return nil
	}
	var env []string
	https, http := client.ProxyVariables()
	for _, variable := range req.Env {
		name, url, _ := strings.Cut(variable, "=")
		scheme, host, ok := strings.Cut(url, "://")
		if ok && (name == https || name == http) {
			env = append(env, name+"="+scheme+"://"+req.ProxyCredentials+"@"+host)
		}
	}
	return env
}

// proxyHeader returns the credentials as they are in the header Proxy-Authorization, which verbose logs of clients may show.
func proxyHeader(login string) string { return base64.StdEncoding.EncodeToString([]byte(login)) }
