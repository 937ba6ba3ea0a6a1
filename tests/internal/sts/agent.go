package sts

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/aws/aws-sdk-go-v2/service/sts/types"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// PodIdentityAudience is the audience of tokens for EKS Pod Identity (Amazon EKS User Guide, "EKS Pod Identity").
const PodIdentityAudience = "pods.eks.amazonaws.com"

// AgentOptions say what an agent is made of.
type AgentOptions struct {
	Issuer *Issuer // of the tokens that it takes
	// STS, Region and Keys reach the security token service; the keys' user may take on the roles of the associations.
	STS, Region string
	Keys        credentials.Keys
	Duration    time.Duration // of sessions; 0: the service's own
}

// Agent stands in for EKS Pod Identity's agent on a node: it answers a service account's token with the keys of a real
// session of the role that the service account is associated with. The real one is at a link-local address.
type Agent struct {
	opts   AgentOptions
	url    string
	server *http.Server
	client *sts.Client

	mu           sync.Mutex
	associations map[[2]string]string // namespace and service account to role
	status       int                  // not 0: the answer to everything
	calls        int
}

// NewAgent starts an agent on loopback.
func NewAgent(opts AgentOptions) (*Agent, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("sts: %w", err)
	}
	a := &Agent{opts: opts, url: "http://" + l.Addr().String() + "/v1/credentials", associations: map[[2]string]string{}, client: sts.New(sts.Options{
		BaseEndpoint: aws.String(opts.STS), Region: opts.Region, RetryMaxAttempts: 1,
		Credentials: awscredentials.NewStaticCredentialsProvider(opts.Keys.AccessKeyID, opts.Keys.SecretAccessKey, opts.Keys.SessionToken),
	})}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/credentials", a.credentials)
	a.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: log.New(io.Discard, "", 0)}
	go func() { _ = a.server.Serve(l) }() // until Close
	return a, nil
}

// URL is where keys are to be had.
func (a *Agent) URL() string { return a.url }

// Close ends the agent.
func (a *Agent) Close() error { return a.server.Close() }

// Associate gives a service account a role; "" takes it away.
func (a *Agent) Associate(namespace, serviceAccount, roleARN string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.associations[[2]string{namespace, serviceAccount}] = roleARN
}

// Fail makes the agent answer everything with an HTTP status; 0: no more.
func (a *Agent) Fail(status int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.status = status
}

// Calls counts the requests.
func (a *Agent) Calls() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.calls
}

func (a *Agent) credentials(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	a.calls++
	status := a.status
	a.mu.Unlock()
	if status != 0 {
		http.Error(w, http.StatusText(status), status)
		return
	}
	token := r.Header.Get("Authorization")
	if token == "" {
		http.Error(w, "Service account token cannot be empty", http.StatusBadRequest)
		return
	}
	namespace, account, err := a.opts.Issuer.Verify(token, PodIdentityAudience)
	if err != nil {
		http.Error(w, "[InvalidTokenException]: "+err.Error(), http.StatusBadRequest)
		return
	}
	a.mu.Lock()
	role := a.associations[[2]string{namespace, account}]
	a.mu.Unlock()
	if role == "" {
		http.Error(w, "[AccessDeniedException]: no association of "+namespace+"/"+account, http.StatusForbidden)
		return
	}
	keys, err := a.session(r.Context(), role, namespace+"-"+account)
	if err != nil {
		http.Error(w, "[InternalServerException]: "+err.Error(), http.StatusInternalServerError)
		return
	}
	// The protocol of containers' credentials (AWS SDKs and Tools Reference Guide, "Container credential provider").
	writeJSON(w, map[string]string{
		"AccessKeyId": *keys.AccessKeyId, "SecretAccessKey": *keys.SecretAccessKey, "Token": *keys.SessionToken,
		"Expiration": keys.Expiration.UTC().Format(time.RFC3339),
	})
}

// session makes a session of the role. The real agent's names hold cluster and pod.
func (a *Agent) session(ctx context.Context, role, name string) (*types.Credentials, error) {
	in := &sts.AssumeRoleInput{RoleArn: &role, RoleSessionName: aws.String("eks-" + name)}
	if a.opts.Duration > 0 {
		in.DurationSeconds = aws.Int32(int32(a.opts.Duration / time.Second))
	}
	out, err := a.client.AssumeRole(ctx, in)
	if err != nil {
		return nil, err
	}
	return out.Credentials, nil
}
