package s3server

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"net/http"
	"time"
)

// xmlns is the STS API's (its service model, 2011-06-15).
const xmlns = "https://sts.amazonaws.com/doc/2011-06-15/"

// stsError is a refusal as the API tells it.
type stsError struct {
	status        int
	code, message string
}

func (e *stsError) Error() string { return e.code + ": " + e.message }

func denied(format string, args ...any) *stsError {
	return &stsError{http.StatusForbidden, "AccessDenied", fmt.Sprintf(format, args...)}
}

func invalid(format string, args ...any) *stsError {
	return &stsError{http.StatusBadRequest, "ValidationError", fmt.Sprintf(format, args...)}
}

func badToken(format string, args ...any) *stsError {
	return &stsError{http.StatusBadRequest, "InvalidIdentityToken", fmt.Sprintf(format, args...)}
}

// The results of the actions, whose elements are the API's.

type sessionKeys struct {
	AccessKeyID     string `xml:"AccessKeyId"`
	SecretAccessKey string
	SessionToken    string
	Expiration      string
}

type assumedUser struct {
	ID  string `xml:"AssumedRoleId"`
	ARN string `xml:"Arn"`
}

type roleResult struct {
	Credentials      sessionKeys
	AssumedRoleUser  assumedUser
	PackedPolicySize int    `xml:",omitempty"`
	Provider         string `xml:",omitempty"`
	Audience         string `xml:",omitempty"`
	Subject          string `xml:"SubjectFromWebIdentityToken,omitempty"`
}

type federatedUser struct {
	ID  string `xml:"FederatedUserId"`
	ARN string `xml:"Arn"`
}

type federationResult struct {
	Credentials      sessionKeys
	FederatedUser    federatedUser
	PackedPolicySize int `xml:",omitempty"`
}

type identityResult struct {
	ARN     string `xml:"Arn"`
	ID      string `xml:"UserId"`
	Account string
}

type metadata struct {
	RequestID string `xml:"RequestId"`
}

// timestamp has seconds, as the API's have: a session never lasts as long as its caller believes only by a fraction.
func timestamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05Z") }

// writeAnswer writes a result, or the refusal.
func writeAnswer(w http.ResponseWriter, action string, result any, fail *stsError) {
	id := make([]byte, 8)
	_, _ = rand.Read(id) // never fails, see crypto/rand
	request := hex.EncodeToString(id)
	w.Header().Set("Content-Type", "text/xml")
	w.Header().Set("X-Amzn-Requestid", request)
	if fail != nil {
		kind := "Sender"
		if fail.status >= http.StatusInternalServerError {
			kind = "Receiver"
		}
		w.WriteHeader(fail.status)
		_ = xml.NewEncoder(w).Encode(struct {
			XMLName xml.Name `xml:"ErrorResponse"`
			NS      string   `xml:"xmlns,attr"`
			Error   struct{ Type, Code, Message string }
			ID      string `xml:"RequestId"`
		}{NS: xmlns, Error: struct{ Type, Code, Message string }{kind, fail.code, fail.message}, ID: request})
		return
	}
	e := xml.NewEncoder(w)
	outer := xml.StartElement{Name: xml.Name{Local: action + "Response"}, Attr: []xml.Attr{{Name: xml.Name{Local: "xmlns"}, Value: xmlns}}}
	_ = e.EncodeToken(outer)
	_ = e.EncodeElement(result, xml.StartElement{Name: xml.Name{Local: action + "Result"}})
	_ = e.EncodeElement(metadata{request}, xml.StartElement{Name: xml.Name{Local: "ResponseMetadata"}})
	_ = e.EncodeToken(outer.End())
	_ = e.Close()
}
