package helper

import (
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// A client has the credentials of its proxy in its environment. Neither its output nor the helper's log shows them.
func TestAClientHasTheCredentialsOfItsProxy(t *testing.T) {
	r := newRig(t)
	const header = "ZHJpdmVyOmNhbmFyeSQx" // driver:canary$1 as clients send it
	req := r.request("env:https_proxy", "env:no_proxy", "env:HEADER", "wait:"+r.dir+"/never")
	req.Env = append(req.Env, "https_proxy=http://proxy.example:3128", "no_proxy=127.0.0.1", "HEADER="+header)
	req.ProxyCredentials = "driver:canary$1"
	if _, err := r.startWith(req); err != nil {
		t.Fatal(err)
	}
	r.says("env http://" + redacted + "@proxy.example:3128")
	r.says("env 127.0.0.1")
	r.says("env " + redacted)
	if strings.Contains(r.log(), "canary") || strings.Contains(r.log(), header) {
		t.Error("the log has the password")
	}
}

func TestASessionIsMadeThroughTheProxyOnly(t *testing.T) {
	order := credentials.Order{STS: credentials.STSService{Endpoint: "https://sts.example:8443"}, AgentURI: "http://169.254.170.23/v1/credentials"}
	if got := exchangeSandbox("/program", order).Ports; !slices.Equal(got, []uint16{8443, 80}) {
		t.Errorf("without a proxy: %d", got)
	}
	order.STS.Proxy = "http://driver:canary@proxy.example:3128"
	if got := exchangeSandbox("/program", order).Ports; !slices.Equal(got, []uint16{3128, 80}) {
		t.Errorf("with a proxy: %d", got)
	}
}
