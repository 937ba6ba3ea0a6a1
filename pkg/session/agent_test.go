package session

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// agentSays answers as EKS Pod Identity's agent.
func agentSays(w http.ResponseWriter, _ asked, _ int) {
	_, _ = fmt.Fprintf(w, `{"AccessKeyId":"ASIAAGENT","SecretAccessKey":"agent-secret","Token":"agent-session-token","AccountId":"111122223333","Expiration":%q}`,
		time.Now().Add(6*time.Hour).UTC().Format(time.RFC3339))
}

func TestThePodIdentityAgentGetsItsTokenAndItsSessionTakesTheRole(t *testing.T) {
	agent, sts := serveSTS(t, agentSays), serveSTS(t, issueForAnHour)
	o := orderFor(credentials.PodIdentity, sts.url)
	o.AgentURI = agent.url + "/v1/credentials"
	keys, err := maker(t).Make(bounded(t), o)
	if err != nil || keys.AccessKeyID != "ASIANEW" {
		t.Fatalf("got %v, %v", keys, err)
	}
	if r := agent.requests()[0]; r.Method != http.MethodGet || r.URL.Path != "/v1/credentials" || r.Header.Get("Authorization") != token {
		t.Errorf("the agent was asked %s %s, %v", r.Method, r.URL, r.Header)
	}
	r := sts.requests()[0]
	if r.form.Get("Action") != "AssumeRole" || r.form.Get("RoleArn") != roleA || r.form.Get("Policy") == "" ||
		!strings.Contains(r.Header.Get("Authorization"), "ASIAAGENT") || r.Header.Get("X-Amz-Security-Token") != "agent-session-token" {
		t.Errorf("STS was asked %v, %v", r.form, r.Header)
	}
	if strings.Contains(fmt.Sprint(r.form, r.Header), "canaryToken") {
		t.Error("the agent's token went to STS")
	}
}

func TestWithoutARoleTheAgentsSessionIsTheAnswer(t *testing.T) {
	agent := serveSTS(t, agentSays)
	o := credentials.Order{Kind: credentials.PodIdentity, Token: token, AgentURI: agent.url}
	keys, err := maker(t).Make(bounded(t), o)
	if err != nil || keys.AccessKeyID != "ASIAAGENT" || keys.SecretAccessKey != "agent-secret" || keys.SessionToken != "agent-session-token" ||
		keys.Account != "111122223333" ||
		time.Until(keys.Expires) < 5*time.Hour {
		t.Errorf("got %+v, %v", keys, err)
	}
}

func TestTheAgentsTokenStaysOnTheNode(t *testing.T) {
	for _, uri := range []string{"", "http://10.0.0.1/", "http://example.com/", "http://localhost/", "http://user@127.0.0.1/", "http://[fe80::1%25eth0]/",
		"ftp://127.0.0.1/"} {
		if _, err := maker(t).Make(bounded(t), credentials.Order{Kind: credentials.PodIdentity, Token: token, AgentURI: uri}); !fault.Is(err, fault.Precondition) {
			t.Errorf("%q: %v", uri, err)
		}
	}
	other := serveSTS(t, agentSays)
	agent := serveSTS(t, func(w http.ResponseWriter, r asked, _ int) { http.Redirect(w, r.Request, other.url, http.StatusFound) })
	if _, err := maker(t).Make(bounded(t), credentials.Order{Kind: credentials.PodIdentity, Token: token, AgentURI: agent.url}); err == nil ||
		len(other.requests()) != 0 {
		t.Errorf("%v, and another got %d requests", err, len(other.requests()))
	}
}

func TestWhatTheAgentSaysHasAKind(t *testing.T) {
	for status, want := range map[int]fault.Kind{400: fault.Denied, 401: fault.Unauthenticated, 403: fault.Denied, 404: fault.Denied, 429: fault.Busy,
		500: fault.Unavailable, 405: fault.Precondition} {
		agent := serveSTS(t, func(w http.ResponseWriter, _ asked, _ int) {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "not you, "+token)
		})
		_, err := maker(t).Make(bounded(t), credentials.Order{Kind: credentials.PodIdentity, Token: token, AgentURI: agent.url, Backend: "backend x"})
		if fault.KindOf(err) != want || !strings.Contains(err.Error(), "not you") || !strings.Contains(err.Error(), "backend x") ||
			strings.Contains(err.Error(), "canary") {
			t.Errorf("%d: %v of kind %d, want %d", status, err, fault.KindOf(err), want)
		}
		if n := len(agent.requests()); (n > 1) != (want == fault.Busy || want == fault.Unavailable) {
			t.Errorf("%d: asked %d times", status, n)
		}
	}
	for _, body := range []string{"", "{}", "<html>", `{"AccessKeyId":"a","SecretAccessKey":"b","Token":"c","Expiration":"2020-01-01T00:00:00Z"}`} {
		agent := serveSTS(t, func(w http.ResponseWriter, _ asked, _ int) { _, _ = io.WriteString(w, body) })
		if keys, err := maker(t).Make(bounded(t), credentials.Order{Kind: credentials.PodIdentity, Token: token, AgentURI: agent.url}); !fault.Is(err,
			fault.Unavailable) || !keys.IsZero() {
			t.Errorf("%q: %v, %v", body, keys, err)
		}
	}
}
