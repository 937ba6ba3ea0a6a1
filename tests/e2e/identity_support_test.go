package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// workloadRole makes the role of a service account, which trusts it alone.
func workloadRole(t testing.TB, namespace, account, policy string, trusted ...string) {
	t.Helper()
	issuer := s3server.TrustedIssuer{URL: world.issuer.URL(), Audiences: []string{audience}}
	for _, name := range trusted {
		issuer.Subjects = append(issuer.Subjects, "system:serviceaccount:"+namespace+":"+name)
	}
	_, err := world.s3.SetRole(t.Context(), s3server.Role{Name: namespace + "." + account, Policy: policy,
		Trust: s3server.Trust{Issuers: []s3server.TrustedIssuer{issuer}}})
	if err != nil {
		t.Fatal(err)
	}
}

// roleOfWorkload is what volumes have as their roleARN.
const roleOfWorkload = "arn:aws:iam::000000000000:role/${pod.namespace}.${pod.serviceAccountName}"

func account(name string) string {
	return "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: " + name + "}\n"
}

// session is what a mount on the node works with, taken from where its client has it: root of the node can do that.
type session struct{ keys credentials.Keys }

// sessionOf is the session of a volume's mount. Where another takes its place, it is that of the one that serves then.
func sessionOf(t testing.TB, v object) (s session) {
	t.Helper()
	eventually(t, "volume "+v.Spec.CSI.VolumeHandle+" to be served with a session", func() (err error) {
		all := recordsOf(t, v)
		serving := slices.DeleteFunc(slices.Clone(all), func(m mountRecord) bool { return m.Phase != "running" || m.Superseded })
		if len(serving) != 1 {
			return fmt.Errorf("it has the mounts %+v, want one that serves", all)
		}
		s, err = serving[0].session(t.Context())
		return err
	})
	return s
}

// session is what the mount's client is given when it asks.
func (m mountRecord) session(ctx context.Context) (session, error) {
	uri, token, err := m.credentials()
	if err != nil {
		return session{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, uri, nil)
	if err != nil {
		return session{}, err
	}
	req.Header.Set("Authorization", token)
	c := http.Client{Transport: &http.Transport{DialContext: rigtest.DialAs(m.UID, dialOnNode), DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := c.Do(req)
	if err != nil {
		return session{}, err
	}
	defer resp.Body.Close()
	var got struct {
		AccessKeyID     string `json:"AccessKeyId"`
		SecretAccessKey string
		Token           string
	}
	err = json.NewDecoder(resp.Body).Decode(&got)
	if err == nil && (resp.StatusCode != http.StatusOK || got.Token == "") {
		err = errors.New("no session")
	}
	if err != nil {
		return session{}, fmt.Errorf("the client's credentials: %s, %w", resp.Status, err)
	}
	return session{credentials.Keys{AccessKeyID: got.AccessKeyID, SecretAccessKey: got.SecretAccessKey, SessionToken: got.Token}}, nil
}

// credentials is where the mount's client gets its own from, as its environment says.
func (m mountRecord) credentials() (uri, token string, err error) {
	client, err := m.findProcess(rig.Programs()[m.Client])
	if err != nil {
		return "", "", err
	}
	environ, err := os.ReadFile(world.Path(fmt.Sprintf("/proc/%d/environ", client.pid)))
	if err != nil {
		return "", "", err
	}
	for kv := range strings.SplitSeq(string(environ), "\x00") {
		switch name, value, _ := strings.Cut(kv, "="); name {
		case "AWS_CONTAINER_CREDENTIALS_FULL_URI":
			uri = value
		case "AWS_CONTAINER_AUTHORIZATION_TOKEN":
			token = value
		}
	}
	if uri == "" || token == "" {
		return "", "", fmt.Errorf("%s has no endpoint for credentials", client)
	}
	return uri, token, nil
}

// dialOnNode connects from the node's network.
func dialOnNode(ctx context.Context, network, address string) (_ net.Conn, err error) {
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	defer own.Close()
	node, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", world.PID()))
	if err != nil {
		return nil, err
	}
	defer node.Close()
	// A thread that ended would end the processes that it has started, so it goes back.
	runtime.LockOSThread()
	defer func() {
		if err := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); err != nil {
			panic(fmt.Sprintf("a thread stays in the node's network: %v", err))
		}
		runtime.UnlockOSThread()
	}()
	if err := unix.Setns(int(node.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, err
	}
	return new(net.Dialer).DialContext(ctx, network, address)
}
