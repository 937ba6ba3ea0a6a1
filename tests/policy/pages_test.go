package policy_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pages"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/sts"
	table "github.com/s3-csi/s3-csi-driver/tests/policy"
)

// The role of docs/how-to/aws.md for nodes allows all that the session of a volume may do, and only in the page's bucket.
func TestTheNodesRoleOfThePage(t *testing.T) {
	t.Parallel()
	issuer, err := sts.NewIssuer()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { issuer.Close() })
	token, err := issuer.Token(sts.TokenRequest{Namespace: "s3-csi", ServiceAccount: "s3-csi-driver-node", Audiences: []string{audience}})
	if err != nil {
		t.Fatal(err)
	}
	s := versitygw(t, issuer, token.Value)
	p := table.NewPlace(t, s.Service, false)
	document := strings.ReplaceAll(pages.Files(pages.Read(t, "how-to/aws"))["node.json"], "$BUCKET", p.Bucket)
	if !json.Valid([]byte(document)) {
		t.Fatalf("the page's node.json is not JSON: %s", document)
	}
	order := s.orders[credentials.WebIdentity]
	order.RoleARN = must(s.process.SetRole(t.Context(), s3server.Role{Name: "node", Policy: document,
		Trust: s3server.Trust{Issuers: []s3server.TrustedIssuer{{URL: issuer.URL()}}}}))(t)
	s.orders[credentials.WebIdentity] = order
	tryWith(t, s, p, credentials.WebIdentity, table.Writing, variant{aws: true})
}
