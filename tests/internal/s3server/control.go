package s3server

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// request is one line to a server process; reply is the line that answers it.
type request struct {
	Op        string   `json:"op"` // as the cases of Server.control
	Name      string   `json:"name,omitempty"`
	Policy    string   `json:"policy,omitempty"`
	Key       string   `json:"key,omitempty"`
	Role      *Role    `json:"role,omitempty"`
	URL       string   `json:"url,omitempty"`
	Audiences []string `json:"audiences,omitempty"`
	ARN       string   `json:"arn,omitempty"`
	STS       *STS     `json:"sts,omitempty"`
}

type reply struct {
	AccessKeyID     string    `json:"accessKeyID,omitempty"`
	SecretAccessKey string    `json:"secretAccessKey,omitempty"`
	Text            string    `json:"text,omitempty"` // an ARN, a URL
	Calls           *STSCalls `json:"calls,omitempty"`
	Error           string    `json:"error,omitempty"`
}

// maxLine bounds a control line: policies are in them.
const maxLine = 1 << 20

// ServeControl answers requests from r on w until r ends: the other half of Process.
func (s *Server) ServeControl(ctx context.Context, r io.Reader, w io.Writer) error {
	in, out := bufio.NewScanner(r), json.NewEncoder(w)
	in.Buffer(nil, maxLine)
	for in.Scan() {
		var req request
		if err := json.Unmarshal(in.Bytes(), &req); err != nil {
			return fmt.Errorf("s3server: control line: %w", err)
		}
		rep, err := s.control(ctx, req)
		if err != nil {
			rep = reply{Error: err.Error()}
		}
		if err := out.Encode(rep); err != nil {
			return err
		}
	}
	return in.Err()
}

func (s *Server) control(ctx context.Context, req request) (rep reply, err error) {
	keys := func(k credentials.Keys, err error) (reply, error) {
		return reply{AccessKeyID: k.AccessKeyID, SecretAccessKey: k.SecretAccessKey}, err
	}
	switch req.Op {
	case "addUser":
		return keys(s.AddUser(ctx, req.Name, req.Policy))
	case "setPolicy":
		return rep, s.SetPolicy(ctx, req.Name, req.Policy)
	case "addKey":
		return keys(s.AddKey(ctx, req.Name))
	case "removeKey":
		return rep, s.RemoveKey(ctx, req.Name, req.Key)
	case "sts":
		return reply{Text: s.STS()}, nil
	case "setSTS":
		return rep, s.SetSTS(ctx, *req.STS)
	case "stsCalls":
		calls, err := s.STSCalls(ctx)
		return reply{Calls: &calls}, err
	case "setRole":
		rep.Text, err = s.SetRole(ctx, *req.Role)
		return rep, err
	case "addIssuer":
		return rep, s.AddIssuer(ctx, req.URL, req.Audiences...)
	case "revokeSessions":
		return rep, s.RevokeSessions(ctx, req.ARN)
	default:
		return rep, fmt.Errorf("s3server: no such control operation: %q", req.Op)
	}
}
