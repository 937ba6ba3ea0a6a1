package session

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// maxAgentAnswer is the maximum size of the agent's response, in bytes.
const maxAgentAnswer = 64 << 10

// askAgent gets the session of the pod's association from EKS Pod Identity's agent (the container credentials protocol: SDKs
// and Tools Reference Guide, "Container credential provider").
func (m *Maker) askAgent(ctx context.Context, o credentials.Order) (credentials.Keys, error) {
	if err := backend.CheckAgent(o.AgentURI); err != nil {
		return credentials.Keys{}, fault.Errorf(fault.Precondition, "%s: podIdentityAgent of the backend %w", subject(o), err)
	}
	client := newHTTPClient(nil, nil) // it is on this machine: no proxy
	defer client.CloseIdleConnections()
	pause := 100 * time.Millisecond
	for attempt := 1; ; attempt++ {
		keys, err := m.agentOnce(ctx, client, o)
		again := fault.Is(err, fault.Unavailable) || fault.Is(err, fault.Busy)
		if err == nil || !again || attempt == attempts {
			return keys, err
		}
		if !conc.Sleep(ctx, pause/2+rand.N(pause/2)) { //nolint:gosec // spreads requests
			return keys, err
		}
		pause = min(2*pause, m.backoff)
	}
}

func (m *Maker) agentOnce(ctx context.Context, client *http.Client, o credentials.Order) (credentials.Keys, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.AgentURI, nil)
	if err != nil {
		return credentials.Keys{}, fault.Errorf(fault.Precondition, "%s: podIdentityAgent of the backend is not a valid URL", subject(o))
	}
	req.Header.Set("Authorization", o.Token)
	sent := m.now()
	resp, err := client.Do(req)
	if err != nil {
		return credentials.Keys{}, agentSilent(ctx, o, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAgentAnswer))
	if err != nil {
		return credentials.Keys{}, agentSilent(ctx, o, err)
	}
	if resp.StatusCode != http.StatusOK {
		return credentials.Keys{}, agentRefused(o, resp.StatusCode, body)
	}
	var answer struct {
		AccessKeyID     string `json:"AccessKeyId"`
		SecretAccessKey string
		Token           string
		AccountID       string `json:"AccountId"`
		Expiration      time.Time
	}
	if err := json.Unmarshal(body, &answer); err != nil || answer.AccessKeyID == "" || answer.SecretAccessKey == "" || answer.Token == "" {
		return credentials.Keys{}, unusable(o, "the response of EKS Pod Identity's agent has no session")
	}
	keys := credentials.Keys{AccessKeyID: answer.AccessKeyID, SecretAccessKey: answer.SecretAccessKey, SessionToken: answer.Token}
	if !answer.Expiration.IsZero() {
		keys.Expires = answer.Expiration.UTC() // by this machine's clock, because the agent runs here
		if !keys.Expires.After(sent) {
			return credentials.Keys{}, unusable(o, "the session of EKS Pod Identity's agent had already expired")
		}
	}
	keys.Account = accountOf(fmt.Sprintf("arn:aws:sts::%s:x", answer.AccountID))
	return keys, nil
}
