package sandbox

import (
	"net/url"
	"strconv"
)

// Port returns the TCP port of a service's URL. It is that of HTTPS if the URL is empty or does not show another.
func Port(rawURL string) uint16 {
	const https = 443
	u, err := url.Parse(rawURL)
	if err != nil {
		return https
	}
	if port, err := strconv.ParseUint(u.Port(), 10, 16); err == nil {
		return uint16(port)
	}
	switch u.Scheme {
	case "http":
		return 80
	case "socks5", "socks5h":
		return 1080
	}
	return https
}
