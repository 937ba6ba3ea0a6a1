package helper

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"net"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// ask sends raw bytes, and descriptors with the first of them, and reads the answer.
func (r *rig) ask(message []byte, fds ...int) reply {
	r.t.Helper()
	conn, err := Dial(r.socket)(bounded(r.t))
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := conn.WriteMsgUnix(message, oob, nil); err != nil {
		r.t.Fatal(err)
	}
	rep, err := readReply(conn)
	if err != nil {
		r.t.Fatal(err)
	}
	return rep
}

func frame(body string) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

func TestServer_RefusesInvalidRequests(t *testing.T) {
	r := newRig(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	fd := int(null.Fd())
	for name, tc := range map[string]struct {
		message []byte
		fds     []int
		kind    fault.Kind
		text    string
	}{
		"newer protocol":         {frame(`{"protocol":5,"op":{"new":"shape"}}`), nil, fault.Unsupported, "protocol 5"},
		"unknown operation":      {frame(`{"protocol":1,"op":"dance"}`), nil, fault.Unsupported, "dance"},
		"no protocol":            {frame(`{"op":"hello"}`), nil, fault.Invalid, "no protocol"},
		"not JSON":               {frame(`hello`), nil, fault.Invalid, ""},
		"wrong type":             {frame(`{"protocol":1,"op":"status","since":"yesterday"}`), nil, fault.Invalid, ""},
		"too long":               {binary.BigEndian.AppendUint32(nil, maxMessage+1), nil, fault.Invalid, ""},
		"empty":                  {binary.BigEndian.AppendUint32(nil, 0), nil, fault.Invalid, ""},
		"start without fd":       {frame(`{"protocol":1,"op":"start","start":{"argv":["/bin/true"]}}`), nil, fault.Invalid, "0 descriptors"},
		"start with two fds":     {frame(`{"protocol":1,"op":"start","start":{"argv":["/bin/true"]}}`), []int{fd, fd}, fault.Invalid, "2 descriptors"},
		"start with very many":   {frame(`{"protocol":1,"op":"start"}`), []int{fd, fd, fd, fd, fd, fd, fd, fd}, fault.Invalid, "more than 4"},
		"start without a client": {frame(`{"protocol":1,"op":"start"}`), []int{fd}, fault.Invalid, "client to start"},
		"hello with an fd":       {frame(`{"protocol":1,"op":"hello"}`), []int{fd}, fault.Invalid, "1 descriptors"},
	} {
		t.Run(name, func(t *testing.T) {
			before := openFDs(t)
			rep := r.ask(tc.message, tc.fds...)
			if rep.Error == nil || rep.Status != nil {
				t.Fatalf("answer: %+v", rep)
			}
			if err := rep.Error.Err(); !fault.Is(err, tc.kind) || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("error: %v", err)
			}
			for end := time.Now().Add(5 * time.Second); openFDs(t) > before && time.Now().Before(end); time.Sleep(time.Millisecond) {
				continue
			}
			if after := openFDs(t); after > before {
				t.Errorf("%d descriptors before, %d after", before, after)
			}
		})
	}
}

func TestUnknownFieldsAreIgnored(t *testing.T) {
	r := newRig(t)
	if rep := r.ask(frame(`{"protocol":1,"op":"hello","later":{"x":[1]}}`)); rep.Error != nil || rep.Status == nil || rep.Status.State != StateIdle {
		t.Errorf("helper: %+v", rep)
	}
	rep, err := readReply(bytes.NewReader(frame(`{"protocol":1,"status":{"protocol":9,"state":"running","mood":"good"},"more":1}`)))
	if err != nil || rep.Status.State != StateRunning || rep.Status.Protocol != 9 {
		t.Errorf("driver: %+v, %v", rep, err)
	}
	if _, err := readReply(bytes.NewReader(frame(`{"protocol":9}`))); !fault.Is(err, fault.Unsupported) {
		t.Errorf("an answer in a newer protocol: %v", err)
	}
}

func TestCheckFuse_RefusesOtherDescriptors(t *testing.T) {
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("/dev/fuse cannot be opened: %v", err)
	}
	defer f.Close()
	if err := checkFuse(f); err != nil {
		t.Errorf("/dev/fuse: %v", err)
	}
	for _, path := range []string{os.DevNull, "/etc/passwd", t.TempDir()} {
		other, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := checkFuse(other); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", path, err)
		}
		_ = other.Close()
	}
	other := t.TempDir() + "/fuse"
	if err := unix.Mknod(other, unix.S_IFCHR|0o600, int(unix.Mkdev(10, 229))); err != nil {
		t.Skipf("a device under another name cannot be made: %v", err)
	}
	g, err := os.OpenFile(other, os.O_RDWR, 0)
	if err != nil {
		t.Skipf("a device under another name cannot be opened: %v", err)
	}
	defer g.Close()
	if err := checkFuse(g); !fault.Is(err, fault.Invalid) {
		t.Errorf("another name: %v", err)
	}
}

func TestSlowCallerDoesNotHoldUpOthers(t *testing.T) {
	r := newRig(t)
	for range 5 {
		conn, err := net.Dial("unix", r.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, _ = conn.Write([]byte{0})
	}
	if _, err := r.peer.Status(bounded(t)); err != nil {
		t.Error(err)
	}
}

func TestStartRequestTravelsWhole(t *testing.T) {
	keys := testKeys
	keys.Expires = time.Date(2030, 1, 2, 3, 4, 5, 6, time.UTC)
	want := StartRequest{Client: "c", Command: client.Command{Argv: []string{"/a", "b"}, Env: []string{"C=d"}}}
	message, err := encode(request{Protocol: 1, Op: opStart, Start: &want, Keys: keys})
	if err != nil {
		t.Fatal(err)
	}
	req, err := decodeRequest(message[4:])
	if err != nil || req.Op != opStart || req.Keys != keys || !reflect.DeepEqual(*req.Start, want) {
		t.Errorf("%+v, %v", req, err)
	}
	if _, err := encode(request{Op: strings.Repeat("x", maxMessage)}); !fault.Is(err, fault.Invalid) {
		t.Errorf("too long: %v", err)
	}
}

func TestOrdersTravelWhole(t *testing.T) {
	order := credentials.Order{
		Kind: credentials.AssumeRole, Keys: testKeys, Token: "t", RoleARN: "r", Name: "n", Policy: `{"a":"<b>&"}`, Duration: 90 * time.Second,
		STS: credentials.STSService{Endpoint: "https://sts.example.com", Region: "r", CA: "-----BEGIN\n", FIPS: true, DualStack: true}, AgentURI: "u",
	}
	order.Keys.Expires = time.Now().Add(time.Hour) // with a zone and a monotonic clock, as it comes
	message, err := encode(request{Protocol: 1, Op: opCredentials, Order: order})
	if err != nil {
		t.Fatal(err)
	}
	req, err := decodeRequest(message[4:])
	got := req.Order
	if err != nil || got.Digest([]byte("salt")) != order.Digest([]byte("salt")) || !got.Keys.Expires.Equal(order.Keys.Expires) {
		t.Errorf("%+v, %v", got, err)
	}
	got.Keys.Expires = order.Keys.Expires
	if got != order {
		t.Errorf("%#v", got)
	}
}

func FuzzDecodeRequest(f *testing.F) {
	for _, seed := range []string{
		`{"protocol":1,"op":"hello"}`,
		`{"protocol":1,"op":"kill"}`,
		`{"protocol":1,"op":"credentials","order":{"kind":"webIdentity","token":"t","duration":3600000000000,"sts":{"endpoint":"https://x"}}}`,
		`{"protocol":1,"op":"credentials","order":{"kind":"assumeRole","keys":{"expires":"9999-12-31T23:59:59Z"}}}`,
		`{"protocol":1,"op":"status","since":3}`,
		`{"protocol":2,"op":"start","start":{"argv":["/a"],"await":true}}`,
		`{"protocol":3}`,
		`{"protocol":1,"op":"start","start":{"argv":["/a"],"env":["A=b"]},"keys":{"accessKeyID":"a","expires":"2030-01-02T03:04:05Z"}}`,
		`[]`,
		`{"protocol":1e9}`,
		``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		req, err := decodeRequest(body)
		if err != nil {
			if fault.KindOf(err) == fault.Unknown {
				t.Errorf("an error without a kind: %v", err)
			}
			return
		}
		if req.Protocol < 1 || req.Protocol > ProtocolVersion {
			t.Errorf("protocol %d was accepted", req.Protocol)
		}
		if again, err := json.Marshal(req); err == nil {
			if _, err := decodeRequest(again); err != nil {
				t.Errorf("%s is not read again: %v", again, err)
			}
		}
		if o := req.Order; !o.IsZero() && len(o.Digest(nil)) != 32 {
			t.Errorf("an order without a digest: %s", body)
		}
	})
}
