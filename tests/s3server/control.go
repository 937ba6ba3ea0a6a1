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
	Op     string `json:"op"` // addUser, setPolicy, addKey, removeKey
	Name   string `json:"name"`
	Policy string `json:"policy,omitempty"`
	Key    string `json:"key,omitempty"`
}

type reply struct {
	AccessKeyID     string `json:"accessKeyID,omitempty"`
	SecretAccessKey string `json:"secretAccessKey,omitempty"`
	Error           string `json:"error,omitempty"`
}

// ServeControl answers requests from r on w until r ends: the other half of Process.
func (s *Server) ServeControl(ctx context.Context, r io.Reader, w io.Writer) error {
	in, out := bufio.NewScanner(r), json.NewEncoder(w)
	for in.Scan() {
		var req request
		if err := json.Unmarshal(in.Bytes(), &req); err != nil {
			return fmt.Errorf("s3server: control line: %w", err)
		}
		keys, err := s.control(ctx, req)
		rep := reply{AccessKeyID: keys.AccessKeyID, SecretAccessKey: keys.SecretAccessKey}
		if err != nil {
			rep = reply{Error: err.Error()}
		}
		if err := out.Encode(rep); err != nil {
			return err
		}
	}
	return in.Err()
}

func (s *Server) control(ctx context.Context, req request) (credentials.Keys, error) {
	switch req.Op {
	case "addUser":
		return s.AddUser(ctx, req.Name, req.Policy)
	case "setPolicy":
		return credentials.Keys{}, s.SetPolicy(ctx, req.Name, req.Policy)
	case "addKey":
		return s.AddKey(ctx, req.Name)
	case "removeKey":
		return credentials.Keys{}, s.RemoveKey(ctx, req.Name, req.Key)
	default:
		return credentials.Keys{}, fmt.Errorf("s3server: no such control operation: %q", req.Op)
	}
}
