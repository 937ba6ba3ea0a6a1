package policy_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	table "github.com/s3-csi/s3-csi-driver/tests/policy"
)

// What stands in a prefix is taken for what it is. AWS's escapes of * ? $ are known to none of these services: what has them they
// take for another prefix, and refuse everything.
func TestPrefixesAreTakenLiterally(t *testing.T) {
	t.Parallel()
	for _, s := range services(t) {
		for _, tt := range []struct {
			aws            bool
			prefix, beside string
		}{
			{true, `q"\é/`, "q/"},
			{false, `q"é/`, "q/"}, {false, "a+b %20/", "a b  /"}, {false, "[a-z]/", "b/"}, {false, "A/", "a/"},
		} {
			if tt.aws && !s.aws {
				continue
			}
			t.Run(s.Name+" "+tt.prefix, func(t *testing.T) {
				t.Parallel()
				p := table.NewPlace(t, s.Service, true)
				document, err := policy.Scope{Bucket: p.Bucket, Prefix: tt.prefix, AWS: tt.aws}.Session()
				if err != nil {
					t.Fatal(err)
				}
				keys, err := s.session(t.Context(), credentials.AssumeRole, document)
				if err != nil {
					t.Fatal(err)
				}
				c := s3.New(s3.Options{BaseEndpoint: aws.String(s.Endpoint), Region: s.Region, UsePathStyle: true, RetryMaxAttempts: 1,
					Credentials: awscredentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.SecretAccessKey, keys.SessionToken)})
				for prefix, may := range map[string]bool{tt.prefix: true, tt.beside: false} {
					_, listed := c.ListObjectsV2(t.Context(), &s3.ListObjectsV2Input{Bucket: &p.Bucket, Prefix: &prefix})
					_, stored := c.PutObject(t.Context(), &s3.PutObjectInput{Bucket: &p.Bucket, Key: aws.String(prefix + "x"), Body: strings.NewReader("x")})
					for what, err := range map[string]error{"listing": listed, "writing below": stored} {
						api, refused := errors.AsType[smithy.APIError](err)
						if may && err != nil || !may && (!refused || api.ErrorCode() != "AccessDenied") {
							t.Errorf("%s %q: %v, allowed: %t", what, prefix, err, may)
						}
					}
				}
			})
		}
	}
}
