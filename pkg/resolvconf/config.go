package resolvconf

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
)

// File is the configuration of resolvers (resolv.conf(5)).
const File = "/etc/resolv.conf"

// Config is the part of a resolv.conf that decides which servers are asked for which names.
type Config struct {
	Nameservers []string // addresses
	Search      []string // domains that are appended to names
	Dots        int      // a name with this many dots is tried as it is first ("ndots")
}

const (
	maxNameservers = 3 // resolvers use no more (MAXNS of resolv.h)
	maxDots        = 15
	maxBytes       = 64 << 10 // of a file
)

// Read reads a resolv.conf, which must name a server.
func Read(file string) (Config, error) {
	content, err := read(file)
	return Parse(content), err
}

// read returns the content of a resolv.conf. A file without a server is usually half written, so it is an error.
func read(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("resolv.conf: %w", err)
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("resolv.conf: %w", err)
	case len(content) > maxBytes:
		return nil, fmt.Errorf("%s is larger than %d bytes", file, maxBytes)
	case len(Parse(content).Nameservers) == 0:
		return nil, fmt.Errorf("%s names no server", file)
	}
	return content, nil
}

// Parse reads a resolv.conf as the C library does (resolv.conf(5)): it ignores what it does not understand.
func Parse(data []byte) Config {
	c := Config{Dots: 1}
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, "#") || strings.HasPrefix(line, ";") {
			continue
		}
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		switch f[0] {
		case "nameserver":
			if len(c.Nameservers) < maxNameservers {
				c.Nameservers = append(c.Nameservers, f[1])
			}
		case "domain":
			c.Search = f[1:2]
		case "search":
			c.Search = f[1:]
		case "options":
			for _, o := range f[1:] {
				if n, err := strconv.Atoi(strings.TrimPrefix(o, "ndots:")); err == nil && strings.HasPrefix(o, "ndots:") && n >= 0 {
					c.Dots = min(n, maxDots)
				}
			}
		}
	}
	return c
}

// Addresses returns the addresses of the servers, without zones.
func (c Config) Addresses() []netip.Addr {
	var all []netip.Addr
	for _, s := range c.Nameservers {
		if a, err := netip.ParseAddr(s); err == nil {
			all = append(all, a.Unmap().WithZone(""))
		}
	}
	return all
}

// Names returns the rooted names that a resolver tries for a name, in order.
func (c Config) Names(name string) []string {
	if strings.HasSuffix(name, ".") {
		return []string{name}
	}
	var names []string
	for _, domain := range c.Search {
		if domain = strings.Trim(domain, "."); domain != "" {
			names = append(names, name+"."+domain+".")
		}
	}
	if strings.Count(name, ".") >= c.Dots {
		return slices.Insert(names, 0, name+".")
	}
	return append(names, name+".")
}
