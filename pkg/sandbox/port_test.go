package sandbox

import "testing"

func TestPort(t *testing.T) {
	for rawURL, want := range map[string]uint16{
		"": 443, "https://s3.example": 443, "https://s3.example:8443/path": 8443, "http://s3.example": 80, "http://[::1]:9000": 9000, "socks5://proxy": 1080,
		"http://user:password@proxy:3128": 3128, "https://s3.example:99999": 443, ":": 443,
	} {
		if got := Port(rawURL); got != want {
			t.Errorf("%q: %d, want %d", rawURL, got, want)
		}
	}
}
