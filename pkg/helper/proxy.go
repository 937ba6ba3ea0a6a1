package helper

import (
	"encoding/base64"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
)

// proxy returns the variables of the command's environment that name a proxy, with the request's credentials for it. They are in no
// record, argument or log. Call under mu.
func (h *helper) proxy(req StartRequest) []string {
	_, password, _ := strings.Cut(req.ProxyCredentials, ":")
	h.scrub.hold(h.options.now(), "proxy", req.ProxyCredentials, password, proxyHeader(req.ProxyCredentials))
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
