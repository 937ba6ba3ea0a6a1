package list

import (
	"bytes"
	"encoding/base64"
	"encoding/json"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// cursor is where a page ended. The next one begins with the bucket, after the record After.
type cursor struct {
	Backend string `json:"b"`
	Bucket  string `json:"n,omitempty"`
	After   string `json:"a,omitempty"` // the segment of a record; "": with the bucket's tags
}

func (c cursor) token() string {
	text, _ := json.Marshal(c) // strings only
	return base64.RawURLEncoding.EncodeToString(text)
}

// parseToken parses a token; "" is the beginning. The error is Busy, which the CSI specification asks for.
func parseToken(token string) (c cursor, err error) {
	if token == "" {
		return c, nil
	}
	text, err := base64.RawURLEncoding.Strict().DecodeString(token)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(text))
		d.DisallowUnknownFields()
		err = d.Decode(&c)
	}
	if err != nil || c.Backend == "" || c.token() != token {
		return cursor{}, fault.Errorf(fault.Busy, "starting_token: not a token of this driver: start again without one")
	}
	return c, nil
}
