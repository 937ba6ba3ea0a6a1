package buckets

import (
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
)

func TestNothingOutsideThePrefixIsDeleted(t *testing.T) {
	for _, tc := range []struct {
		prefix, key string
		ok          bool
	}{
		{"vol-1/", "vol-1/x", true}, {"vol-1/", "vol-1/", true}, {"", "x", true},
		{"vol-1/", "vol-10/x", false}, {"vol-1/", "vol-1", false}, {"vol-1/", "", false}, {"vol-1", "vol-1/x", false}, {"vol-1", "vol-10", false},
	} {
		if err := CheckBelow(tc.prefix, tc.key); (err == nil) != tc.ok {
			t.Errorf("%q below %q: %v", tc.key, tc.prefix, err)
		}
	}
}

func TestKeysOfListingsAreDecodedWhereTheServiceEncodedThem(t *testing.T) {
	for _, tc := range []struct {
		key      string
		encoding types.EncodingType
		want     string
	}{
		{"a+b%2Fc%01", types.EncodingTypeUrl, "a b/c\x01"}, {"a+b%2F", "", "a+b%2F"}, {"100%", types.EncodingTypeUrl, "!"},
	} {
		got, err := PlainKey(aws.String(tc.key), tc.encoding)
		if (tc.want == "!") != (err != nil) || err == nil && got != tc.want {
			t.Errorf("%q: %q, %v", tc.key, got, err)
		}
	}
}
