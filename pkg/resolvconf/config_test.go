package resolvconf

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestParseReadsLikeTheCLibrary(t *testing.T) {
	for text, want := range map[string]Config{
		"":                        {Dots: 1},
		"nameserver 10.96.0.10\n": {Nameservers: []string{"10.96.0.10"}, Dots: 1},
		"nameserver 10.96.0.10":   {Nameservers: []string{"10.96.0.10"}, Dots: 1},
		"nameserver\n":            {Dots: 1},
		"# nameserver 1.1.1.1\n":  {Dots: 1},
		";nameserver 1.1.1.1\n":   {Dots: 1},
		"nameserver 1\nnameserver 2\nnameserver 3\nnameserver 4\n": {Nameservers: []string{"1", "2", "3"}, Dots: 1},
		"search a b\nsearch c\n":                                   {Search: []string{"c"}, Dots: 1},
		"search a b\ndomain c d\n":                                 {Search: []string{"c"}, Dots: 1},
		"options ndots:5 timeout:1":                                {Dots: 5},
		"options ndots:99":                                         {Dots: 15},
		"options ndots:x ndots:-1 7":                               {Dots: 1},
		"search default.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n": {
			Nameservers: []string{"10.96.0.10"}, Search: []string{"default.svc.cluster.local", "svc.cluster.local", "cluster.local"}, Dots: 5,
		},
	} {
		if got := Parse([]byte(text)); !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, want %+v", text, got, want)
		}
	}
}

func TestNamesFollowTheSearchDomains(t *testing.T) {
	pod := Config{Search: []string{"x.svc.cluster.local", "cluster.local.", "."}, Dots: 5}
	host := Config{Search: []string{"example.org"}, Dots: 1}
	for _, c := range []struct {
		config Config
		name   string
		want   []string
	}{
		{pod, "minio.storage.svc", []string{"minio.storage.svc.x.svc.cluster.local.", "minio.storage.svc.cluster.local.", "minio.storage.svc."}},
		{pod, "minio.storage.svc.", []string{"minio.storage.svc."}},
		{host, "minio.storage.svc", []string{"minio.storage.svc.", "minio.storage.svc.example.org."}},
		{host, "minio", []string{"minio.example.org.", "minio."}},
		{Config{Dots: 1}, "minio", []string{"minio."}},
	} {
		if got := c.config.Names(c.name); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.name, got, c.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"nameserver 10.96.0.10\nsearch a b\noptions ndots:5\n", "options ndots:99999999999999999999", "domain\x00.", "search ..\n#"} {
		f.Add(s, "minio.storage")
	}
	f.Fuzz(func(t *testing.T, text, name string) {
		c := Parse([]byte(text))
		if c.Dots < 0 || c.Dots > maxDots || len(c.Nameservers) > maxNameservers {
			t.Fatalf("%+v", c)
		}
		names := c.Names(name)
		for _, n := range names {
			if !strings.HasSuffix(n, ".") || !strings.HasPrefix(n, name) {
				t.Fatalf("%q: %q", name, names)
			}
		}
		if len(names) == 0 {
			t.Fatalf("%q: no name", name)
		}
	})
}
