package volume

import (
	"strings"
	"testing"
)

func TestValidateBucketNameTellsTheKind(t *testing.T) {
	for name, want := range map[string]BucketKind{
		"abc":                               BucketGeneralPurpose,
		"my-bucket.v2":                      BucketGeneralPurpose,
		strings.Repeat("a", 63):             BucketGeneralPurpose,
		"1.2.3":                             BucketGeneralPurpose,
		"tarzan":                            BucketGeneralPurpose,
		"a--b":                              BucketGeneralPurpose,
		"logs-111122223333-us-west-2-an":    BucketAccountRegional,
		"l-111122223333-us-gov-west-1-an":   BucketAccountRegional,
		"base--usw2-az1--x-s3":              BucketDirectory,
		"base-2--usw2-lax1-az1--x-s3":       BucketDirectory,
		"my-ap-abcdefghijklmnopqrs-s3alias": BucketAccessPoint,
		"fsx-ap-abc-ext-s3alias":            BucketAccessPoint,
	} {
		if got, err := ValidateBucketName(name); err != nil || got != want {
			t.Errorf("ValidateBucketName(%q) = %q, %v", name, got, err)
		}
	}
}

func TestValidateBucketNameRefusesNamesThatNoVolumeCanHave(t *testing.T) {
	for name, word := range map[string]string{
		"":                        "3 to 63",
		"ab":                      "3 to 63",
		strings.Repeat("a", 64):   "3 to 63",
		"Bucket":                  "a-z",
		"my_bucket":               "a-z",
		"bücket":                  "a-z",
		"a/b":                     "a-z",
		"a:b":                     "a-z",
		"abc\n":                   "a-z",
		"-abc":                    "start and end",
		"abc-":                    "start and end",
		".abc":                    "start and end",
		"abc.":                    "start and end",
		"a..b":                    "two dots",
		"192.168.5.4":             "IP address",
		"xn--abc":                 "reserves",
		"sthree-abc":              "reserves",
		"sthree-configurator-x":   "reserves",
		"amzn-s3-demo-bucket":     "reserves",
		"abc--ol-s3":              "Object Lambda",
		"abc--op-s3":              "Outposts",
		"abc.mrap":                "multi-Region",
		"abc--table-s3":           "table bucket",
		"abc--usw2-az1--xa-s3":    "directory bucket",
		"abc--x-s3":               "--x-s3",
		"a.b--usw2-az1--x-s3":     "--x-s3",
		"my-an":                   "-an",
		"logs-1111-us-west-2-an":  "-an",
		"a.b-s3alias":             "alias",
		"arn:aws:s3:::my-bucket1": "alias of the access point",
		"s3://my-bucket/a/b":      `bucketName "my-bucket" and prefix "a/b"`,
	} {
		_, err := ValidateBucketName(name)
		wantInvalid(t, err, "", word)
	}
}

func TestCheckBucketName_AllowsWhatOtherServicesDo(t *testing.T) {
	for name, want := range map[string]bool{
		"my_bucket": true, "Data": true, "my-an": true, "xn--abc": true, "sthree-abc": true, "_x_": true, "a..b": true, "abc-": true, "192.168.5.4": true,
		strings.Repeat("a", 255): true, strings.Repeat("a", 256): false, "ab": false, "...": false, "a/b": false, "a:b": false, "a b": false, "a\nb": false,
		"a*b":    false,
		"bücket": false, "-abc": false, "s3://abc": false,
	} {
		if err := CheckBucketName(name); (err == nil) != want {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func FuzzValidateBucketName(f *testing.F) {
	for _, s := range []string{"abc", "192.168.5.4", "base--usw2-az1--x-s3", "logs-111122223333-us-west-2-an", "x-s3alias", "xn--a", "a..b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		kind, err := ValidateBucketName(s)
		if relaxed := CheckBucketName(s); relaxed != nil && err == nil || relaxed == nil && strings.ContainsAny(s, "/:*?$%\\ \x00\n") {
			t.Fatalf("%q: %v, but relaxed %v", s, err, relaxed)
		}
		if err != nil {
			wantInvalid(t, err, "")
			return
		}
		if kind == "" || len(s) < 3 || len(s) > 63 || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-.") != "" {
			t.Fatalf("%q is %q", s, kind)
		}
	})
}
