package policy_test

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	table "github.com/s3-csi/s3-csi-driver/tests/policy"
)

// policyFor is what the driver gives to the security token service, in the words for AWS or for others.
func policyFor(s table.Scope, bucket string, aws bool) (string, error) {
	sc := policy.Scope{Bucket: bucket, Prefix: table.Prefix, Needs: policy.Needs{Delete: true}, AWS: aws}
	switch s {
	case table.Keeping:
		sc.Needs.Delete = false
	case table.Reading:
		sc.ReadOnly = true
	case table.Whole:
		sc.Prefix = ""
	case table.WholeRead:
		sc.Prefix, sc.ReadOnly = "", true
	case table.Measuring:
		return sc.Usage(".s3-csi/volumes/vol-1", false)
	case table.MeasuringWhole:
		sc.Prefix = ""
		return sc.Usage("", true)
	case table.Deleting:
		return sc.Deletion([]string{".s3-csi/volumes/vol-1"})
	}
	return sc.Session()
}

func TestSessionsReachNoFurtherThanTheirScope(t *testing.T) {
	t.Parallel()
	for _, s := range services(t) {
		for kind := range s.orders {
			for _, sc := range table.AllScopes() {
				if kind != credentials.AssumeRole && sc != table.Writing {
					continue // how a session was made makes no difference, one scope shows
				}
				for _, v := range []variant{{}, {open: true}, {open: true, aws: true}} {
					if v.aws && !s.aws {
						continue
					}
					t.Run(strings.Join([]string{s.Name, string(kind), string(sc)}, " ")+v.String(), func(t *testing.T) {
						t.Parallel()
						tryAll(t, s, kind, sc, v)
					})
				}
			}
		}
	}
}

// variant is what a table is tried with.
type variant struct {
	open bool // a bucket policy lets the session do everything
	aws  bool // the session policy is one for AWS
}

func (v variant) String() string {
	text := ""
	if v.open {
		text += ", with a bucket policy that allows all"
	}
	if v.aws {
		text += ", as on AWS"
	}
	return text
}

func tryAll(t *testing.T, s service, kind credentials.Kind, sc table.Scope, v variant) {
	t.Helper()
	tryWith(t, s, table.NewPlace(t, s.Service, v.open), kind, sc, v)
}

func tryWith(t *testing.T, s service, p table.Place, kind credentials.Kind, sc table.Scope, v variant) {
	t.Helper()
	document, err := policyFor(sc, p.Bucket, v.aws)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := s.session(t.Context(), kind, document)
	if err != nil {
		t.Fatal(err)
	}
	table.Try(t, p, sc, keys)
}
