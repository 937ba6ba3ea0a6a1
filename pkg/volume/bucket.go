package volume

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// BucketKind is the kind of a bucket, according to its name.
type BucketKind string

const (
	// BucketGeneralPurpose is an ordinary bucket.
	BucketGeneralPurpose BucketKind = "general purpose"
	// BucketAccountRegional is a general purpose bucket in its account's own namespace: <name>-<account>-<region>-an.
	BucketAccountRegional BucketKind = "account-regional"
	// BucketDirectory is a directory bucket (S3 Express One Zone, Local Zones): <name>--<zone id>--x-s3.
	BucketDirectory BucketKind = "directory"
	// BucketAccessPoint is an access point under its alias: <name>-s3alias.
	BucketAccessPoint BucketKind = "access point alias"
)

const (
	accountRegional Pattern = `^[a-z0-9][a-z0-9.-]*-[0-9]{12}-[a-z]{2,}(-[a-z]+)+-[0-9]+-an$`
	directory       Pattern = `^[a-z0-9]([a-z0-9-]*[a-z0-9])?--[a-z0-9]+(-[a-z0-9]+)+--x-s3$`
	relaxedName     Pattern = `^[A-Za-z0-9._][A-Za-z0-9._-]{2,254}$`
	accessPoint     Pattern = `^[a-z0-9][a-z0-9-]*[a-z0-9]-s3alias$`
)

// ValidateBucketName checks a bucket's name against the rules that Amazon S3 has for its kinds of buckets
// (https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html and, for directory buckets,
// directory-bucket-naming-rules.html there) and returns the kind. The error is Invalid.
func ValidateBucketName(name string) (BucketKind, error) {
	kind, err := bucketKind(name)
	if err != nil {
		return "", fault.Errorf(fault.Invalid, "bucket name %q %w", name, err)
	}
	return kind, nil
}

// bucketKind is ValidateBucketName with errors that continue a sentence about the name.
func bucketKind(name string) (BucketKind, error) {
	if err := checkBucketCharacters(name); err != nil {
		return "", err
	}
	if err := notReserved(name); err != nil {
		return "", err
	}
	for _, s := range []struct {
		suffix  string
		kind    BucketKind
		form    Pattern
		problem string
	}{
		{"--x-s3", BucketDirectory, directory, "ends in --x-s3 but is not <name>--<zone id>--x-s3"},
		{"-s3alias", BucketAccessPoint, accessPoint, "ends in -s3alias but is not <name>-s3alias"},
		{"-an", BucketAccountRegional, accountRegional, "ends in -an, which Amazon S3 reserves for <name>-<account id>-<region>-an"},
	} {
		if strings.HasSuffix(name, s.suffix) {
			if !s.form.MatchString(name) {
				return "", errors.New(s.problem)
			}
			return s.kind, nil
		}
	}
	for suffix, kind := range map[string]string{
		"--xa-s3":    "an access point of a directory bucket",
		"--ol-s3":    "an Object Lambda access point",
		"--op-s3":    "an access point on Outposts",
		".mrap":      "a multi-Region access point",
		"--table-s3": "a table bucket",
	} {
		if strings.HasSuffix(name, suffix) {
			return "", fmt.Errorf("names %s, which cannot be a volume", kind)
		}
	}
	if _, err := netip.ParseAddr(name); err == nil {
		return "", errors.New("is an IP address")
	}
	return BucketGeneralPurpose, nil
}

// notReserved refuses names with a prefix that Amazon S3 reserves.
func notReserved(name string) error {
	for _, prefix := range []string{"xn--", "sthree-", "amzn-s3-demo-"} {
		if strings.HasPrefix(name, prefix) {
			return fmt.Errorf("starts with %q, which Amazon S3 reserves", prefix)
		}
	}
	return nil
}

// CheckBucketName checks a bucket's name against the rules that hold for all services and clients: 3 to 255 of letters, digits, ".", "-" and
// "_", not ".." nor beginning with "-". Where a backend has bucketNames: relaxed, they are the only ones. The error continues a sentence.
func CheckBucketName(name string) error {
	if err := notARN(name); err != nil {
		return err
	}
	if !relaxedName.MatchString(name) || strings.Trim(name, ".") == "" {
		return errors.New(`must have 3 to 255 of a-z, A-Z, 0-9, ".", "-" and "_", and not begin with "-"`)
	}
	return nil
}

func notARN(name string) error {
	if strings.HasPrefix(name, "arn:") {
		return errors.New("is an ARN; use the alias of the access point (…-s3alias)")
	}
	if rest, ok := strings.CutPrefix(name, "s3://"); ok {
		bucket, prefix, _ := strings.Cut(rest, "/")
		return fmt.Errorf("is an S3 URI; use bucketName %q and prefix %q", printable(bucket), printable(prefix))
	}
	return nil
}

func checkBucketCharacters(name string) error {
	if err := notARN(name); err != nil {
		return err
	}
	if len(name) < 3 || len(name) > 63 {
		return fmt.Errorf("has %d characters, 3 to 63 are allowed", len(name))
	}
	if !consistsOf(name, func(c byte) bool { return isLower(c) || c == '-' || c == '.' }) {
		return errors.New(`may contain only a-z, 0-9, "-" and "."`)
	}
	if !isLower(name[0]) || !isLower(name[len(name)-1]) {
		return errors.New("must start and end with a letter or a digit")
	}
	if strings.Contains(name, "..") {
		return errors.New("contains two dots in a row")
	}
	return nil
}
