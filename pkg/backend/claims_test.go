package backend

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestClaimsHaveToBeTrueAndDecideNothing(t *testing.T) {
	config, err := ParseConfig([]byte(`
backends:
  default: {region: eu-central-1}
  yandex: {endpoint: "https://storage.yandexcloud.net", region: ru-central1}
  minio: {endpoint: "http://MinIO.storage.svc:9000"}
  garage: {endpoint: "https://garage.example:443", addressing: virtual, caFile: /etc/ca.pem}
  china: {region: cn-north-1}
  gov: {region: us-gov-west-1}
`), "", "")
	check(t, err)
	for name, c := range map[string]struct {
		backend string
		kind    volume.ClaimKind
		value   string
		want    []string // parts of the error; nil: it is true
	}{
		"the very endpoint":  {"yandex", volume.ClaimEndpoint, "https://storage.yandexcloud.net", nil},
		"a slash at its end": {"yandex", volume.ClaimEndpoint, "https://storage.yandexcloud.net/", nil},
		"its default port":   {"yandex", volume.ClaimEndpoint, "https://storage.yandexcloud.net:443", nil},
		"no default port":    {"garage", volume.ClaimEndpoint, "https://garage.example", nil},
		"capitals":           {"minio", volume.ClaimEndpoint, "HTTP://minio.storage.SVC:9000", nil},
		"another backend's": {"minio", volume.ClaimEndpoint, "https://storage.yandexcloud.net",
			[]string{"secrets.x: ", "set backend: yandex", "http://minio.storage.svc:9000"}},
		"unknown": {"minio", volume.ClaimEndpoint, "https://s3.example",
			[]string{"declare a backend with endpoint: https://s3.example", "backend minio"}},
		"unknown, of AWS": {"default", volume.ClaimEndpoint, "https://s3.example",
			[]string{"declare a backend with endpoint: https://s3.example", "backend default (AWS)"}},
		"another port":                {"minio", volume.ClaimEndpoint, "http://minio.storage.svc:9001", []string{"declare a backend"}},
		"another scheme":              {"yandex", volume.ClaimEndpoint, "http://storage.yandexcloud.net", []string{"declare a backend"}},
		"a host that begins the same": {"yandex", volume.ClaimEndpoint, "https://storage.yandexcloud.net.evil.example", []string{"declare a backend"}},
		"a password":                  {"yandex", volume.ClaimEndpoint, "https://user:hidden@storage.yandexcloud.net", []string{"must be http"}},
		"a path":                      {"yandex", volume.ClaimEndpoint, "https://storage.yandexcloud.net/hidden", []string{"must be http"}},
		"no scheme":                   {"yandex", volume.ClaimEndpoint, "storage.yandexcloud.net", []string{"https://"}},
		"nothing":                     {"yandex", volume.ClaimEndpoint, "", []string{"https://"}},
		"AWS's of the region":         {"default", volume.ClaimEndpoint, "https://s3.eu-central-1.amazonaws.com", nil},
		"AWS's of another region":     {"default", volume.ClaimEndpoint, "https://s3.us-west-2.amazonaws.com/", nil},
		"AWS's old one":               {"default", volume.ClaimEndpoint, "https://s3-us-west-2.amazonaws.com", nil},
		"AWS's global one":            {"default", volume.ClaimEndpoint, "https://s3.amazonaws.com", nil},
		"AWS's without TLS":           {"default", volume.ClaimEndpoint, "http://s3.amazonaws.com", []string{"declare a backend"}},
		"AWS's of one network": {"default", volume.ClaimEndpoint, "https://bucket.vpce-1a2b3c4d-5e6f.s3.us-east-1.vpce.amazonaws.com",
			[]string{"declare a backend"}},
		"AWS's with FIPS":                  {"default", volume.ClaimEndpoint, "https://s3-fips.us-east-1.amazonaws.com", []string{"declare a backend"}},
		"a host that ends like AWS's":      {"default", volume.ClaimEndpoint, "https://s3.evilamazonaws.com", []string{"declare a backend"}},
		"a host that begins like AWS's":    {"default", volume.ClaimEndpoint, "https://s3.us-east-1.amazonaws.com.evil.example", []string{"declare a backend"}},
		"another service of AWS":           {"default", volume.ClaimEndpoint, "https://sqs.us-east-1.amazonaws.com", []string{"declare a backend"}},
		"China's, of the world":            {"default", volume.ClaimEndpoint, "https://s3.cn-north-1.amazonaws.com.cn", []string{"set backend: china"}},
		"China's":                          {"china", volume.ClaimEndpoint, "https://s3.cn-northwest-1.amazonaws.com.cn", nil},
		"the world's, of China":            {"china", volume.ClaimEndpoint, "https://s3.eu-central-1.amazonaws.com", []string{"set backend: default"}},
		"a region of China in the world":   {"china", volume.ClaimEndpoint, "https://s3.cn-north-1.amazonaws.com", []string{"declare a backend"}},
		"GovCloud's":                       {"gov", volume.ClaimEndpoint, "https://s3.us-gov-east-1.amazonaws.com", nil},
		"the world's, of GovCloud":         {"gov", volume.ClaimEndpoint, "https://s3.us-east-1.amazonaws.com", []string{"set backend: default"}},
		"AWS's, of another service":        {"yandex", volume.ClaimEndpoint, "https://s3.eu-central-1.amazonaws.com", []string{"set backend: default"}},
		"the region":                       {"yandex", volume.ClaimRegion, "ru-central1", nil},
		"another region":                   {"yandex", volume.ClaimRegion, "us-east-1", []string{`"us-east-1" is not the region`, "ru-central1"}},
		"the default region":               {"minio", volume.ClaimRegion, "us-east-1", nil},
		"a region that the backend lacks":  {"minio", volume.ClaimRegion, "eu-1", []string{"set that region"}},
		"any region of AWS":                {"default", volume.ClaimRegion, "us-west-2", nil},
		"bucket in the path":               {"minio", volume.ClaimPathStyle, "", nil},
		"bucket in the path, of AWS":       {"default", volume.ClaimPathStyle, "true", nil},
		"bucket in the host":               {"garage", volume.ClaimPathStyle, "", []string{"addressing: path"}},
		"bucket in the host, as it is":     {"garage", volume.ClaimPathStyle, "false", nil},
		"certificates are checked":         {"yandex", volume.ClaimInsecure, "false", nil},
		"certificates, and not a boolean":  {"yandex", volume.ClaimInsecure, "no", nil},
		"certificates are not checked":     {"yandex", volume.ClaimInsecure, "True", []string{"set caFile for backend yandex", "caFile"}},
		"certificates of AWS":              {"default", volume.ClaimInsecure, "true", []string{"remove it"}},
		"certificates of a known CA":       {"garage", volume.ClaimInsecure, "true", nil},
		"no certificates at all":           {"minio", volume.ClaimInsecure, "1", nil},
		"an unknown kind":                  {"minio", "colour", "blue", []string{"unknown kind"}},
		"a backend that is not configured": {"gone", volume.ClaimRegion, "x", []string{`no backend "gone"`}},
	} {
		t.Run(name, func(t *testing.T) {
			err := config.CheckClaims(c.backend, []volume.Claim{{Kind: c.kind, Field: "secrets.x", Value: c.value}})
			if c.want == nil {
				check(t, err)
				return
			}
			if !fault.Is(err, fault.Precondition) {
				t.Fatalf("got %v, want Precondition", err)
			}
			wantText(t, err, c.want...)
			if strings.Contains(err.Error(), "hidden") {
				t.Errorf("the error shows what may be a secret: %v", err)
			}
		})
	}
	check(t, config.CheckClaims("gone", nil))
	err = config.CheckClaims("minio", []volume.Claim{{Kind: volume.ClaimRegion, Value: "us-east-1"},
		{Kind: volume.ClaimEndpoint, Field: "second", Value: "https://s3.example"}})
	wantText(t, err, "second: ")
}

func FuzzClaimedEndpoint(f *testing.F) {
	for _, s := range []string{"https://s3.example", "https://S3.example:443/", "https://s3.us-east-1.amazonaws.com", "http://u:p@s3.example",
		"https://s3.example\x00", "//s3.example", "https://[::1]:9"} {
		f.Add(s)
	}
	config, err := ParseConfig([]byte(`backends: {other: {endpoint: "https://s3.example"}}`), "us-east-1", "")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, endpoint string) {
		if err := config.CheckClaims("other", []volume.Claim{{Kind: volume.ClaimEndpoint, Value: endpoint}}); err == nil {
			canonical := strings.TrimSuffix(strings.TrimSuffix(strings.ToLower(strings.TrimSpace(endpoint)), "/"), ":443")
			if strings.TrimSuffix(canonical, ".") != "https://s3.example" {
				t.Errorf("%q is taken for https://s3.example", endpoint)
			}
		}
	})
}
