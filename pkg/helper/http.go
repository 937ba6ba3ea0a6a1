package helper

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"
)

// maxHead bounds the head of a request to the credential endpoint, in bytes.
const maxHead = 8 << 10

// httpRequest is the part of an HTTP/1 request that the endpoint needs.
type httpRequest struct {
	method, path  string
	authorization string
}

var (
	errHeadTooLong = errors.New("request header too long")
	errBadRequest  = errors.New("malformed HTTP/1 request")
)

// readHead reads a request up to and including the empty line. Bytes after it are dropped: a connection carries one request
// without a body.
func readHead(r io.Reader) ([]byte, error) {
	buf := make([]byte, 0, 1024)
	for {
		if len(buf) == cap(buf) {
			if len(buf) >= maxHead {
				return nil, errHeadTooLong
			}
			buf = append(make([]byte, 0, min(4*cap(buf), maxHead)), buf...)
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		from := max(0, len(buf)-3)
		buf = buf[:len(buf)+n]
		if i := bytes.Index(buf[from:], []byte("\r\n\r\n")); i >= 0 {
			return buf[:from+i+4], nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// parseHead parses a request strictly (RFC 9112), because only SDKs send requests here.
func parseHead(head []byte) (httpRequest, error) {
	lines := strings.Split(strings.TrimSuffix(string(head), "\r\n\r\n"), "\r\n")
	parts := strings.Split(lines[0], " ")
	if len(parts) != 3 || !isToken(parts[0]) || !strings.HasPrefix(parts[1], "/") || !isVisible(parts[1]) ||
		(parts[2] != "HTTP/1.1" && parts[2] != "HTTP/1.0") {
		return httpRequest{}, errBadRequest
	}
	req := httpRequest{method: parts[0], path: parts[1]}
	seen := false
	for _, line := range lines[1:] {
		name, value, ok := strings.Cut(line, ":")
		if !ok || !isToken(name) { // also refuses folded lines, which begin with white space
			return httpRequest{}, errBadRequest
		}
		value = strings.Trim(value, " \t")
		for i := range len(value) {
			if value[i] < ' ' && value[i] != '\t' || value[i] == 0x7f {
				return httpRequest{}, errBadRequest
			}
		}
		switch strings.ToLower(name) {
		case "authorization":
			if seen {
				return httpRequest{}, errBadRequest
			}
			seen, req.authorization = true, value
		case "content-length":
			if n, err := strconv.ParseUint(value, 10, 32); err != nil || n != 0 {
				return httpRequest{}, errBadRequest
			}
		case "transfer-encoding":
			return httpRequest{}, errBadRequest
		}
	}
	return req, nil
}

// isToken: RFC 9110, section 5.6.2.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return s != ""
}

func isVisible(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}

// httpAnswer returns a whole answer, after which the connection is closed.
func httpAnswer(status string, body []byte) []byte {
	var b bytes.Buffer
	b.WriteString("HTTP/1.1 " + status + "\r\n")
	b.WriteString("Content-Type: application/json\r\nCache-Control: no-store\r\nConnection: close\r\n")
	b.WriteString("Content-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n")
	b.Write(body)
	return b.Bytes()
}
