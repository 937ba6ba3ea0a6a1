package dns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
)

func TestTheServerKnowsItsNamesAndNoOthers(t *testing.T) {
	s, err := Start(map[string]netip.Addr{"minio.storage.": netip.MustParseAddr("127.0.0.9")})
	if err != nil {
		t.Skip(err)
	}
	defer s.Close()
	other, err := Start(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if other.Address == s.Address {
		t.Error("two servers have one address")
	}
	r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, net.JoinHostPort(s.Address.String(), "53"))
	}}
	if got, err := r.LookupHost(t.Context(), "MINIO.storage."); err != nil || len(got) != 1 || got[0] != "127.0.0.9" {
		t.Errorf("%v, %v", got, err)
	}
	var unknown *net.DNSError
	if _, err := r.LookupHost(t.Context(), "minio.elsewhere."); !errors.As(err, &unknown) || !unknown.IsNotFound {
		t.Errorf("%v", err)
	}
	if s.Asked("minio.storage.") == 0 || s.Asked("minio.elsewhere.") == 0 || s.Asked("nobody.") != 0 {
		t.Errorf("asked: %v", s.asked)
	}
}
