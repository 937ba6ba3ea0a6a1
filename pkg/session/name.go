package session

import (
	"encoding/json"
	"io"
	"os"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Bounds of session names in bytes: RoleSessionName, and Name of GetFederationToken (STS API Reference).
const (
	maxName           = 64
	maxFederationName = 32
)

// ours is the prefix of names of sessions that are not for one pod.
const ours = "s3csi"

// sessionName returns the name that the cloud's audit log shows: the pod, if there is one, and the mount.
func sessionName(r Request, kind credentials.Kind) string {
	limit, who := maxName, ours
	if kind == credentials.FederationToken {
		limit = maxFederationName
	}
	if r.Source == credentials.SourceWorkload && r.Pod.Namespace != "" {
		who = r.Pod.Namespace + "." + r.Pod.ServiceAccount
	}
	name := cut(clean(r.Name), limit/2)
	if name == "" {
		return cut(clean(who), limit)
	}
	// The mount's name must stay whole, so the pod's is cut.
	return strings.TrimRight(cut(clean(who), limit-len(name)-1), ".-") + "." + name
}

// clean replaces characters that one of the kinds does not allow. Letters, digits, _ and +=,.@- are allowed.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < 0x80 && (r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' || strings.ContainsRune("_+=,.@-", r)) {
			return r
		}
		return '-'
	}, s)
}

func cut(s string, limit int) string { return s[:min(len(s), limit)] }

// maxTokenFile bounds the file of a token, in bytes.
const maxTokenFile = 16 << 10

// ReadToken reads the token of a service account from a file, which kubelet keeps up to date. Unauthenticated: it has none.
func ReadToken(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxTokenFile+1))
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(raw))
	switch {
	case len(raw) > maxTokenFile:
		return "", fault.Errorf(fault.Unauthenticated, "%s is too large for a token", path)
	case token == "":
		return "", fault.Errorf(fault.Unauthenticated, "%s is empty", path)
	}
	return token, nil
}

// audiences returns a token's audiences (RFC 7519, section 4.1.3: a string or a list). It verifies nothing: the result only
// decides which services do not get the token.
func audiences(token string) []string {
	var claims struct {
		Audience json.RawMessage `json:"aud"`
	}
	if !credentials.ReadClaims(token, &claims) {
		return nil
	}
	var one string
	if json.Unmarshal(claims.Audience, &one) == nil {
		return []string{one}
	}
	var all []string
	if json.Unmarshal(claims.Audience, &all) != nil {
		return nil
	}
	return all
}
