package helper

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// serveEndpoint is an endpoint with a clock of its own.
func serveEndpoint(t *testing.T) (e *endpoint, url string, clock *time.Time) {
	t.Helper()
	now := time.Date(2030, 1, 2, 3, 4, 5, 600, time.UTC)
	log, err := os.Create(t.TempDir() + "/log")
	if err != nil {
		t.Fatal(err)
	}
	read := func() time.Time { return now }
	e, err = newEndpoint(newLogger(log, &scrubber{}, read), read, newTestCallers(t))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); e.serve() }()
	t.Cleanup(func() { e.close(); <-done; _ = log.Close() })
	return e, "http://" + e.listener.Addr().String() + endpointPath, &now
}

func get(t testing.TB, url, token string) (status int, body map[string]string) {
	t.Helper()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(bounded(t), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", token)
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&body); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, body
}

func TestEndpoint_AdvertisesAtMostFifteenMinutes(t *testing.T) {
	e, url, now := serveEndpoint(t)
	for name, tc := range map[string]struct {
		real   time.Duration // 0: never
		told   string
		status int
	}{
		"never":  {0, "2030-01-02T03:19:05Z", 200},
		"later":  {time.Hour, "2030-01-02T03:19:05Z", 200},
		"sooner": {2 * time.Minute, "2030-01-02T03:06:05Z", 200},
		"past":   {-time.Minute, "", 503},
	} {
		t.Run(name, func(t *testing.T) {
			keys := testKeys
			if tc.real != 0 {
				keys.Expires = now.Add(tc.real)
			}
			e.setKeys(keys, keys.Expires)
			status, body := get(t, url, e.token)
			if status != tc.status || body["Expiration"] != tc.told {
				t.Errorf("%d %v", status, body)
			}
			if status == 200 && (body["AccessKeyId"] != keys.AccessKeyID || body["SecretAccessKey"] != keys.SecretAccessKey || body["Token"] != keys.SessionToken) {
				t.Errorf("document: %v", body)
			}
		})
	}
	e.setKeys(credentials.Keys{}, time.Time{})
	if status, body := get(t, url, e.token); status != 503 || body["code"] != "NoCredentials" {
		t.Errorf("without keys: %d %v", status, body)
	}
}

func TestEndpoint_LimitsWrongTokensOnly(t *testing.T) {
	e, url, now := serveEndpoint(t)
	e.setKeys(testKeys, time.Time{})
	count := map[int]int{}
	for i := range 3 * wrongBurst {
		status, body := get(t, url, []string{"", "wrong", "Bearer " + e.token}[i%3])
		count[status]++
		if body["SecretAccessKey"] != "" {
			t.Fatalf("a wrong token was answered: %v", body)
		}
		if status, _ := get(t, url, e.token); status != 200 {
			t.Fatalf("the right token, after %d wrong ones: %d", i+1, status)
		}
	}
	if count[403] != wrongBurst || count[429] != 2*wrongBurst {
		t.Errorf("wrong tokens: %v", count)
	}
	*now = now.Add(2 * wrongEvery)
	if status, _ := get(t, url, "wrong"); status != 403 {
		t.Errorf("a while later: %d", status)
	}
}

func TestEndpoint_SilentConnectionsDoNotBlockTheClient(t *testing.T) {
	e, url, _ := serveEndpoint(t)
	e.setKeys(testKeys, time.Time{})
	for range 2 * maxReading {
		conn, err := net.Dial("tcp", e.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	if status, _ := get(t, url, e.token); status != 200 {
		t.Errorf("status %d", status)
	}
}

func TestEndpoint_RefusesOtherRequests(t *testing.T) {
	e, _, _ := serveEndpoint(t)
	e.setKeys(testKeys, time.Time{})
	auth := "Authorization: " + e.token + "\r\n"
	for name, tc := range map[string]struct{ request, status string }{
		"as an SDK asks":        {"GET /credentials HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n" + auth + "\r\n", "200 OK"},
		"lower case header":     {"GET /credentials HTTP/1.1\r\nauthorization:" + e.token + "\r\n\r\n", "200 OK"},
		"HTTP/1.0":              {"GET /credentials HTTP/1.0\r\n" + auth + "\r\n", "200 OK"},
		"no token":              {"GET /credentials HTTP/1.1\r\n\r\n", "403 Forbidden"},
		"token twice":           {"GET /credentials HTTP/1.1\r\n" + auth + auth + "\r\n", "400 Bad Request"},
		"token and more":        {"GET /credentials HTTP/1.1\r\nAuthorization: " + e.token + " x\r\n\r\n", "403 Forbidden"},
		"another path":          {"GET / HTTP/1.1\r\n" + auth + "\r\n", "404 Not Found"},
		"another method":        {"PUT /credentials HTTP/1.1\r\n" + auth + "\r\n", "405 Method Not Allowed"},
		"a body":                {"GET /credentials HTTP/1.1\r\n" + auth + "Content-Length: 3\r\n\r\nabc", "400 Bad Request"},
		"chunks":                {"GET /credentials HTTP/1.1\r\n" + auth + "Transfer-Encoding: chunked\r\n\r\n", "400 Bad Request"},
		"folded":                {"GET /credentials HTTP/1.1\r\nX: y\r\n " + auth + "\r\n", "400 Bad Request"},
		"HTTP/2":                {"PRI * HTTP/2.0\r\n\r\n", "400 Bad Request"},
		"a proxy's request":     {"GET http://169.254.169.254/ HTTP/1.1\r\n" + auth + "\r\n", "400 Bad Request"},
		"line feeds in a value": {"GET /credentials HTTP/1.1\r\nX: a\nb\r\n" + auth + "\r\n", "400 Bad Request"},
		"much too long":         {"GET /credentials HTTP/1.1\r\nX: " + strings.Repeat("x", maxHead) + "\r\n" + auth + "\r\n", "431 Request Header Fields Too Large"},
		"more after the head":   {"GET /credentials HTTP/1.1\r\n" + auth + "\r\n" + strings.Repeat("z", 1000), "200 OK"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", e.listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
			// In two pieces, as a network may deliver it.
			half := len(tc.request) / 2
			_, _ = io.WriteString(conn, tc.request[:half])
			time.Sleep(time.Millisecond)
			_, _ = io.WriteString(conn, tc.request[half:])
			answer := make([]byte, 4096)
			n, err := io.ReadAtLeast(conn, answer, 20)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(string(answer[:n]), "HTTP/1.1 "+tc.status+"\r\n") {
				t.Errorf("answer: %.40q, want %s", answer[:n], tc.status)
			}
		})
	}
}

func FuzzParseHead(f *testing.F) {
	for _, seed := range []string{
		"GET /credentials HTTP/1.1\r\nHost: a\r\nAuthorization: t\r\n\r\n", "GET / HTTP/1.0\r\n\r\n", "\r\n\r\n",
		"GET  / HTTP/1.1\r\n: x\r\n\r\n", "GET / HTTP/1.1\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		head, err := readHead(strings.NewReader(string(raw)))
		if err != nil {
			return
		}
		if len(head) > maxHead {
			t.Fatalf("a head of %d bytes", len(head))
		}
		req, err := parseHead(head)
		if err != nil {
			return
		}
		if !strings.HasPrefix(req.path, "/") || strings.ContainsAny(req.method+req.path+req.authorization, "\r\n\x00") {
			t.Errorf("accepted %+v", req)
		}
		// What is accepted here means the same to the standard library.
		std, err := http.ReadRequest(bufioReader(head))
		if err != nil {
			return // stricter in places that do not matter here, such as Host
		}
		if std.Method != req.method || std.RequestURI != req.path || std.Header.Get("Authorization") != req.authorization {
			t.Errorf("%+v here, %s %s %q there", req, std.Method, std.RequestURI, std.Header.Get("Authorization"))
		}
	})
}

func TestEndpoint_AnswersAreValidHTTP(t *testing.T) {
	resp, err := http.ReadResponse(bufioReader(httpAnswer("200 OK", []byte("{}"))), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || string(body) != "{}" || !resp.Close {
		t.Errorf("%+v %q %v", resp, body, err)
	}
}

// A renewal that ends while a client asks is not missed.
func TestEndpoint_ServesARenewalThatEndedMeanwhile(t *testing.T) {
	e, _, _ := serveEndpoint(t)
	e.sessionMissing = func() bool {
		e.setKeys(testKeys, time.Time{})
		return false // no session is missing any more
	}
	if status, _ := e.respond([]byte("GET " + endpointPath + " HTTP/1.1\r\nAuthorization: " + e.token + "\r\n\r\n")); !strings.HasPrefix(status, "200 ") {
		t.Error(status)
	}
}

func newTestCallers(t *testing.T) *callers {
	t.Helper()
	c := newCallers()
	if c == nil {
		t.Fatal("the kernel has no sock_diag")
	}
	t.Cleanup(func() { _ = unix.Close(c.netlink) })
	return c
}

func TestCallers_OwnUserIsAdmittedAndAnEndedConnectionIsNot(t *testing.T) {
	c := newTestCallers(t)
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	from := addressOf(conn.LocalAddr())
	if uid, ok := c.admits(addressOf(l.Addr()), from); !ok || uid != uint32(os.Getuid()) {
		t.Errorf("uid %d, %v", uid, ok)
	}
	if err := conn.(*net.TCPConn).SetLinger(0); err != nil { // no TIME_WAIT
		t.Fatal(err)
	}
	_ = conn.Close()
	if uid, ok := c.admits(addressOf(l.Addr()), from); ok {
		t.Errorf("an ended connection is one of uid %d", uid)
	}
	// A kernel without the diagnosis of TCP sockets does not find the listener either.
	if _, ok := c.admits(netip.MustParseAddrPort("127.0.0.1:1"), from); !ok {
		t.Error("nothing is admitted without the kernel's help")
	}
	if _, ok := (*callers)(nil).admits(addressOf(l.Addr()), from); !ok {
		t.Error("nothing is admitted without sock_diag")
	}
}
