package policy

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	accessPoint = "arn:aws:s3:eu-west-1:123456789012:accesspoint/my-ap"
	express     = "data--use1-az4--x-s3"
)

func one(s ...string) string {
	return `{"Version":"2012-10-17","Statement":[` + strings.Join(s, ",") + `]}`
}

func TestSessionPoliciesAreExactlyThese(t *testing.T) {
	for _, tc := range []struct {
		name  string
		scope Scope
		want  string
	}{
		{"a prefix", Scope{Bucket: "data", Prefix: "vol-1/", Needs: Needs{Delete: true}}, one(
			`{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::data","Condition":{"StringLike":{"s3:prefix":"vol-1/*"}}}`,
			`{"Effect":"Allow","Action":["s3:GetObject","s3:PutObject","s3:AbortMultipartUpload","s3:DeleteObject"],"Resource":"arn:aws:s3:::data/vol-1/*"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws:s3:::data","arn:aws:s3:::data/vol-1/*"]}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"vol-1/*"}}}`)},
		{"a prefix, only to be read, in China", Scope{Partition: "aws-cn", Bucket: "data", Prefix: "a/b/", ReadOnly: true, AWS: true, Needs: Needs{Delete: true}},
			one(
				`{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws-cn:s3:::data","Condition":{"StringLike":{"s3:prefix":"a/b/*"}}}`,
				`{"Effect":"Allow","Action":"s3:GetObject","Resource":"arn:aws-cn:s3:::data/a/b/*"}`,
				`{"Effect":"Deny","NotAction":["s3:ListBucket","s3:GetObject"],"Resource":"*"}`,
				`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws-cn:s3:::data","arn:aws-cn:s3:::data/a/b/*"]}`,
				`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"a/b/*"}}}`)},
		{"a whole bucket", Scope{Bucket: "data"}, one(
			`{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::data"}`,
			`{"Effect":"Allow","Action":["s3:GetObject","s3:PutObject","s3:AbortMultipartUpload"],"Resource":"arn:aws:s3:::data/*"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws:s3:::data","arn:aws:s3:::data/*"]}`,
			`{"Effect":"Deny","Action":"s3:*","Resource":"arn:aws:s3:::data/.s3-csi/*"}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringLike":{"s3:prefix":".s3-csi/*"}}}`)},
		{"with KMS", Scope{Partition: "aws-us-gov", Bucket: "data", Prefix: "p/", AWS: true, KMS: true}, one(
			`{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws-us-gov:s3:::data","Condition":{"StringLike":{"s3:prefix":"p/*"}}}`,
			`{"Effect":"Allow","Action":["s3:GetObject","s3:PutObject","s3:AbortMultipartUpload"],"Resource":"arn:aws-us-gov:s3:::data/p/*"}`,
			`{"Effect":"Allow","Action":["kms:Decrypt","kms:GenerateDataKey"],"Resource":"*",`+
				`"Condition":{"StringLike":{"kms:EncryptionContext:aws:s3:arn":["arn:aws-us-gov:s3:::data","arn:aws-us-gov:s3:::data/*"],"kms:ViaService":"s3.*"}}}`,
			`{"Effect":"Deny","NotAction":["s3:ListBucket","s3:GetObject","s3:PutObject","s3:AbortMultipartUpload","kms:Decrypt","kms:GenerateDataKey"],"Resource":"*"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws-us-gov:s3:::data","arn:aws-us-gov:s3:::data/p/*"]}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"p/*"}}}`,
			`{"Effect":"Deny","Action":"kms:*","Resource":"*","Condition":{"StringNotLike":{"kms:ViaService":"s3.*"}}}`)},
		{"KMS is for AWS alone", Scope{Bucket: "data", Prefix: "p/", ReadOnly: true, KMS: true}, one(
			`{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::data","Condition":{"StringLike":{"s3:prefix":"p/*"}}}`,
			`{"Effect":"Allow","Action":"s3:GetObject","Resource":"arn:aws:s3:::data/p/*"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws:s3:::data","arn:aws:s3:::data/p/*"]}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"p/*"}}}`)},
		{"wildcards that are meant, and characters of other scripts", Scope{Bucket: "data", Prefix: `a*?$"\é😀&/`, ReadOnly: true, AWS: true}, one(
			`{"Effect":"Allow","Action":"s3:ListBucket",`+
				`"Resource":"arn:aws:s3:::data","Condition":{"StringLike":{"s3:prefix":"a${*}${?}${$}\"\\\u00e9\ud83d\ude00&/*"}}}`,
			`{"Effect":"Allow","Action":"s3:GetObject","Resource":"arn:aws:s3:::data/a${*}${?}${$}\"\\\u00e9\ud83d\ude00&/*"}`,
			`{"Effect":"Deny","NotAction":["s3:ListBucket","s3:GetObject"],"Resource":"*"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws:s3:::data","arn:aws:s3:::data/a${*}${?}${$}\"\\\u00e9\ud83d\ude00&/*"]}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"a${*}${?}${$}\"\\\u00e9\ud83d\ude00&/*"}}}`)},
		{"an access point", Scope{Bucket: accessPoint, Prefix: "p/", ReadOnly: true, AWS: true}, one(
			`{"Effect":"Allow","Action":"s3:ListBucket","Resource":["`+accessPoint+`","arn:aws:s3:::*"],"Condition":{"StringLike":{"s3:prefix":"p/*"}}}`,
			`{"Effect":"Allow","Action":"s3:GetObject","Resource":["`+accessPoint+`/object/p/*","arn:aws:s3:::*"]}`,
			`{"Effect":"Deny","NotAction":["s3:ListBucket","s3:GetObject"],"Resource":"*"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["`+accessPoint+`","arn:aws:s3:::*","`+accessPoint+`/object/p/*"]}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"p/*"}}}`,
			`{"Effect":"Deny","Action":"s3:*","Resource":"arn:aws:s3:::*","Condition":{"StringNotEquals":{"s3:DataAccessPointArn":"`+accessPoint+`"}}}`)},
		{"a directory bucket", Scope{Bucket: express, AWS: true}, one(
			`{"Effect":"Allow","Action":"s3express:CreateSession","Resource":"arn:aws:s3express:*:*:bucket/`+express+`"}`,
			`{"Effect":"Deny","NotAction":"s3express:CreateSession","Resource":"*"}`,
			`{"Effect":"Deny","Action":"s3express:*","NotResource":"arn:aws:s3express:*:*:bucket/`+express+`"}`)},
		{"a directory bucket, only to be read", Scope{Bucket: express, AWS: true, ReadOnly: true}, one(
			`{"Effect":"Allow","Action":"s3express:CreateSession",`+
				`"Resource":"arn:aws:s3express:*:*:bucket/`+express+`","Condition":{"StringEquals":{"s3express:SessionMode":"ReadOnly"}}}`,
			`{"Effect":"Deny","NotAction":"s3express:CreateSession","Resource":"*"}`,
			`{"Effect":"Deny","Action":"s3express:*","NotResource":"arn:aws:s3express:*:*:bucket/`+express+`"}`,
			`{"Effect":"Deny","Action":"s3express:CreateSession","Resource":"*","Condition":{"StringNotEquals":{"s3express:SessionMode":"ReadOnly"}}}`)},
		{"elsewhere, a name like a directory bucket's is a name", Scope{Bucket: express, Prefix: "p/", ReadOnly: true}, one(
			`{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::`+express+`","Condition":{"StringLike":{"s3:prefix":"p/*"}}}`,
			`{"Effect":"Allow","Action":"s3:GetObject","Resource":"arn:aws:s3:::`+express+`/p/*"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws:s3:::`+express+`","arn:aws:s3:::`+express+`/p/*"]}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"p/*"}}}`)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := tc.scope.Session()
			must(t, err)
			if got != tc.want {
				t.Errorf("got\n%s\nwant\n%s", strings.ReplaceAll(got, `{"Effect"`, "\n"+`{"Effect"`), strings.ReplaceAll(tc.want, `{"Effect"`, "\n"+`{"Effect"`))
			}
		})
	}
}

func TestDeletionPoliciesAreExactlyThese(t *testing.T) {
	for _, tc := range []struct {
		name    string
		scope   Scope
		records []string
		want    string
	}{
		{"a prefix with its record and the service's tests", Scope{Bucket: "data", Prefix: "vol-1/"}, []string{".s3-csi/volumes/vol-1", ".s3-csi/probe/"}, one(
			`{"Effect":"Allow","Action":["s3:ListBucket","s3:ListBucketVersions"],"Resource":"arn:aws:s3:::data",`+
				`"Condition":{"StringLike":{"s3:prefix":["vol-1/*",".s3-csi/probe/*",".s3-csi/volumes/vol-1"]}}}`,
			`{"Effect":"Allow","Action":"s3:ListBucketMultipartUploads","Resource":"arn:aws:s3:::data"}`,
			`{"Effect":"Allow","Action":["s3:DeleteObject*","s3:AbortMultipartUpload"],"Resource":["arn:aws:s3:::data/vol-1/*","arn:aws:s3:::data/.s3-csi/probe/*"]}`,
			`{"Effect":"Allow","Action":["s3:GetObject","s3:PutObject"],"Resource":["arn:aws:s3:::data/.s3-csi/probe/*","arn:aws:s3:::data/.s3-csi/volumes/vol-1"]}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws:s3:::data","arn:aws:s3:::data/*"]}`,
			`{"Effect":"Deny","Action":["s3:DeleteObject*","s3:AbortMultipartUpload"],"NotResource":["arn:aws:s3:::data/vol-1/*","arn:aws:s3:::data/.s3-csi/probe/*"]}`,
			`{"Effect":"Deny","Action":["s3:GetObject","s3:PutObject"],"NotResource":["arn:aws:s3:::data/.s3-csi/probe/*","arn:aws:s3:::data/.s3-csi/volumes/vol-1"]}`,
			`{"Effect":"Deny","Action":["s3:ListBucket","s3:ListBucketVersions"],"Resource":"*",`+
				`"Condition":{"StringNotLike":{"s3:prefix":["vol-1/*",".s3-csi/probe/*",".s3-csi/volumes/vol-1"]}}}`)},
		{"a whole bucket", Scope{Bucket: "data"}, nil, one(
			`{"Effect":"Allow","Action":["s3:ListBucket","s3:ListBucketVersions"],"Resource":"arn:aws:s3:::data"}`,
			`{"Effect":"Allow","Action":["s3:ListBucketMultipartUploads","s3:GetBucketTagging","s3:PutBucketTagging","s3:DeleteBucket"],"Resource":"arn:aws:s3:::data"}`,
			`{"Effect":"Allow","Action":["s3:DeleteObject*","s3:AbortMultipartUpload"],"Resource":"arn:aws:s3:::data/*"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws:s3:::data","arn:aws:s3:::data/*"]}`)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := tc.scope.Deletion(tc.records)
			must(t, err)
			if got != tc.want {
				t.Errorf("got\n%s\nwant\n%s", strings.ReplaceAll(got, `{"Effect"`, "\n"+`{"Effect"`), strings.ReplaceAll(tc.want, `{"Effect"`, "\n"+`{"Effect"`))
			}
		})
	}
}

func TestUsagePoliciesAreExactlyThese(t *testing.T) {
	const record = ".s3-csi/volumes/vol-1"
	for _, tc := range []struct {
		name   string
		scope  Scope
		record string
		tags   bool
		want   string
	}{
		{"a prefix with its record", Scope{Bucket: "data", Prefix: "vol-1/"}, record, false, one(
			`{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::data","Condition":{"StringLike":{"s3:prefix":"vol-1/*"}}}`,
			`{"Effect":"Allow","Action":"s3:GetObject","Resource":"arn:aws:s3:::data/`+record+`"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":["arn:aws:s3:::data","arn:aws:s3:::data/`+record+`"]}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"vol-1/*"}}}`)},
		{"a static prefix", Scope{Bucket: "data", Prefix: "p/", ReadOnly: true, KMS: true, AWS: true, Needs: Needs{Delete: true}}, "", false, one(
			`{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::data","Condition":{"StringLike":{"s3:prefix":"p/*"}}}`,
			`{"Effect":"Deny","NotAction":"s3:ListBucket","Resource":"*"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":"arn:aws:s3:::data"}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"p/*"}}}`)},
		{"a bucket of its own", Scope{Bucket: "data"}, "", true, one(
			`{"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::data"}`,
			`{"Effect":"Allow","Action":"s3:GetBucketTagging","Resource":"arn:aws:s3:::data"}`,
			`{"Effect":"Deny","Action":"s3:*","NotResource":"arn:aws:s3:::data"}`,
			`{"Effect":"Deny","Action":"s3:*","Resource":"arn:aws:s3:::data/.s3-csi/*"}`,
			`{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringLike":{"s3:prefix":".s3-csi/*"}}}`)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := tc.scope.Usage(tc.record, tc.tags)
			must(t, err)
			if got != tc.want {
				t.Errorf("got\n%s\nwant\n%s", strings.ReplaceAll(got, `{"Effect"`, "\n"+`{"Effect"`), strings.ReplaceAll(tc.want, `{"Effect"`, "\n"+`{"Effect"`))
			}
		})
	}
}

func TestWhatAPolicyCannotSayIsRefused(t *testing.T) {
	long := strings.Repeat("x", 400) + "/"
	for _, tc := range []struct {
		name  string
		scope Scope
		text  string
	}{
		{"a wildcard where it cannot be escaped", Scope{Bucket: "data", Prefix: "a*/"}, "one of * ? $"},
		{"a question mark", Scope{Bucket: "data", Prefix: "a?/"}, "one of * ? $"},
		{"a variable", Scope{Bucket: "data", Prefix: "${aws:username}/"}, "one of * ? $"},
		{"a long prefix", Scope{Bucket: "data", Prefix: long, AWS: true}, "use a shorter prefix"},
		{"a line break", Scope{Bucket: "data", Prefix: "a\nb/"}, "control character"},
		{"a separator of lines", Scope{Bucket: "data", Prefix: "a\u2028b/"}, "control character"},
		{"not UTF-8", Scope{Bucket: "data", Prefix: "a\xff/", AWS: true}, "UTF-8"},
		{"a way up", Scope{Bucket: "data", Prefix: "a/../b/"}, "path segment"},
		{"a dot", Scope{Bucket: "data", Prefix: "./"}, "path segment"},
		{"an empty segment", Scope{Bucket: "data", Prefix: "a//"}, "empty path segment"},
		{"the root", Scope{Bucket: "data", Prefix: "/"}, "empty path segment"},
		{"no slash at the end", Scope{Bucket: "data", Prefix: "vol-1"}, "does not end"},
		{"the driver's records", Scope{Bucket: "data", Prefix: ".s3-csi/volumes/"}, "records"},
		{"a prefix of a directory bucket", Scope{Bucket: express, Prefix: "p/", AWS: true}, "scope: off"},
		{"an alias", Scope{Bucket: "my-ap-abcdefghijklmnop-s3alias", AWS: true}, "alias"},
		{"an access point elsewhere", Scope{Bucket: accessPoint}, "only AWS"},
		{"an access point of another partition", Scope{Bucket: accessPoint, Partition: "aws-cn", AWS: true}, "another partition"},
		{"an object lambda", Scope{Bucket: "arn:aws:s3-object-lambda:eu-west-1:123456789012:accesspoint/x", AWS: true}, "not an access point's"},
		{"an access point of all Regions", Scope{Bucket: "arn:aws:s3::123456789012:accesspoint/m.mrap", AWS: true}, "not an access point's"},
		{"no bucket", Scope{AWS: true}, "no bucket"},
		{"a wildcard for a bucket", Scope{Bucket: "da*a", AWS: true}, "no bucket"},
		{"a partition that is none", Scope{Partition: "aws:x", Bucket: "data", AWS: true}, "partition"},
		{"a partition elsewhere", Scope{Partition: "aws-cn", Bucket: "data"}, "partition"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for kind, of := range map[string]func() (string, error){
				"session":  tc.scope.Session,
				"deletion": func() (string, error) { return tc.scope.Deletion(nil) },
			} {
				got, err := of()
				if !fault.Is(err, fault.Precondition) || got != "" {
					t.Errorf("%s: %q, %v", kind, got, err)
				} else if kind == "session" && !strings.Contains(err.Error(), tc.text) {
					t.Errorf("%s: %v does not say %q", kind, err, tc.text)
				}
			}
		})
	}
	if _, err := (Scope{Bucket: "data", Prefix: "a/"}).Deletion([]string{"x*"}); !fault.Is(err, fault.Precondition) {
		t.Errorf("a record key with a wildcard: %v", err)
	}
}

func TestTheLongestOrdinaryVolumeFits(t *testing.T) {
	// A volume id has 128 bytes, of which the prefix can take 122.
	s := Scope{Partition: "aws-us-gov", Bucket: strings.Repeat("b", 63), Prefix: strings.Repeat("p", 121) + "/", AWS: true, KMS: true, Needs: Needs{Delete: true}}
	if p, err := s.Session(); err != nil {
		t.Errorf("%d characters, %v", len(p), err)
	}
	s.Bucket, s.Partition = accessPoint, ""
	if p, err := s.Session(); err != nil {
		t.Errorf("through an access point: %d characters, %v", len(p), err)
	}
	s.Bucket, s.Prefix = "bbb", strings.Repeat("p", 80)+"/"
	if p, err := s.Deletion([]string{".s3-csi/volumes/" + strings.Repeat("n", 40), ".s3-csi/probe/"}); err != nil {
		t.Errorf("a deletion: %d characters, %v", len(p), err)
	}
}
