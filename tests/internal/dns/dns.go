// Package dns is a name server for tests: on an address of this machine that no other process uses, it knows some names and no
// others.
package dns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Server answers until it is closed.
type Server struct {
	// Address is where it answers, at port 53.
	Address netip.Addr

	names map[string]netip.Addr
	conn  *net.UDPConn
	ended chan struct{}

	mu    sync.Mutex
	asked map[string]int
}

// servers is how many can live on a machine at the same time.
const servers = 250

// Start starts a server. names are rooted, as "minio.storage.svc.cluster.test.".
func Start(names map[string]netip.Addr) (*Server, error) {
	var last error
	for n := range servers {
		addr := netip.AddrFrom4([4]byte{127, 53, 53, byte(n + 1)})
		conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 53)))
		if err != nil {
			last = err
			continue
		}
		s := &Server{Address: addr, names: names, conn: conn, ended: make(chan struct{}), asked: map[string]int{}}
		go s.serve()
		return s, nil
	}
	return nil, fmt.Errorf("a name server on 127.53.53.0: %w", last)
}

// Close ends the server.
func (s *Server) Close() error {
	err := s.conn.Close()
	<-s.ended
	return err
}

// Asked tells how often the server was asked for a name, known or not.
func (s *Server) Asked(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[strings.ToLower(name)]
}

// ResolvConf is a resolv.conf that leads to the server, as a pod's does.
func (s *Server) ResolvConf(search string) string {
	return fmt.Sprintf("search %s\nnameserver %s\noptions ndots:5 timeout:2 attempts:2\n", search, s.Address)
}

func (s *Server) serve() {
	defer close(s.ended)
	buf := make([]byte, 4096)
	for {
		n, from, err := s.conn.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(time.Millisecond)
			continue
		}
		if answer, err := s.answer(buf[:n]); err == nil {
			_, _ = s.conn.WriteToUDPAddrPort(answer, from) // who hears nothing asks again
		}
	}
}

func (s *Server) answer(query []byte) ([]byte, error) {
	var p dnsmessage.Parser
	header, err := p.Start(query)
	if err != nil {
		return nil, err
	}
	q, err := p.Question()
	if err != nil {
		return nil, err
	}
	name := strings.ToLower(q.Name.String())
	s.mu.Lock()
	s.asked[name]++
	s.mu.Unlock()
	addr, known := s.names[name]
	answer := dnsmessage.Header{ID: header.ID, Response: true, Authoritative: true, RecursionDesired: header.RecursionDesired, RecursionAvailable: true}
	if !known {
		answer.RCode = dnsmessage.RCodeNameError
	}
	b := dnsmessage.NewBuilder(nil, answer)
	if err := errors.Join(b.StartQuestions(), b.Question(q), b.StartAnswers()); err != nil {
		return nil, err
	}
	if known && q.Type == dnsmessage.TypeA {
		err := b.AResource(dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 1}, dnsmessage.AResource{A: addr.As4()})
		if err != nil {
			return nil, err
		}
	}
	return b.Finish()
}
