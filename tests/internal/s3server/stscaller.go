package s3server

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/versity/versitygw/iamapi/types"
)

// call is one request to the service.
type call struct {
	request *http.Request
	body    []byte
	form    url.Values
	clock   func() time.Time // the service's
	state   STS
	session string // the name of the session that it made
}

func newCall(r *http.Request, body []byte) (*call, *stsError) {
	c := &call{request: r, body: body}
	form, err := url.ParseQuery(string(body))
	if err != nil {
		return c, invalid("%v", err)
	}
	for name, values := range r.URL.Query() {
		form[name] = append(form[name], values...)
	}
	c.form = form
	return c, nil
}

func (c *call) action() string { return c.form.Get("Action") }

// caller is who has signed a request. One of the last three is set.
type caller struct {
	arn, id string
	root    bool
	user    *types.User
	session *types.Session
}

const (
	algorithm   = "AWS4-HMAC-SHA256"
	amzDate     = "20060102T150405Z"
	maxSkew     = 15 * time.Minute
	tokenHeader = "X-Amz-Security-Token"
)

// authorization is the header of that name (AWS General Reference, "Signature Version 4").
type authorization struct {
	key, date, region, service string
	signed                     []string
	signature                  string
}

func parseAuthorization(header string) (authorization, *stsError) {
	rest, ok := strings.CutPrefix(header, algorithm+" ")
	if !ok {
		return authorization{}, &stsError{http.StatusForbidden, "MissingAuthenticationToken", "Request is missing Authentication Token"}
	}
	fields := map[string]string{}
	for part := range strings.SplitSeq(rest, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		fields[name] = value
	}
	scope := strings.Split(fields["Credential"], "/")
	if len(scope) != 5 || scope[4] != "aws4_request" || fields["SignedHeaders"] == "" || fields["Signature"] == "" {
		return authorization{}, &stsError{http.StatusBadRequest, "IncompleteSignature", "Authorization header is not complete"}
	}
	return authorization{scope[0], scope[1], scope[2], scope[3], strings.Split(fields["SignedHeaders"], ";"), fields["Signature"]}, nil
}

// caller finds out who has signed the request, by signing it again with the secret that belongs to the key.
func (s *service) caller(ctx context.Context, c *call) (caller, error) {
	auth, fail := parseAuthorization(c.request.Header.Get("Authorization"))
	if fail != nil {
		return caller{}, fail
	}
	date, err := time.Parse(amzDate, c.request.Header.Get("X-Amz-Date"))
	if err != nil || date.Format("20060102") != auth.date {
		return caller{}, mismatch("Date in Credential scope does not match YYYYMMDD from ISO-8601 version of date from HTTP")
	}
	if auth.service != "sts" || auth.region != s.region {
		return caller{}, mismatch("Credential should be scoped to a valid region (%s) and to correct service: sts, not %s/%s", s.region, auth.region, auth.service)
	}
	who, secret, err := s.identify(ctx, auth.key, c.request.Header.Get(tokenHeader))
	if err != nil {
		return caller{}, err
	}
	// The signature comes before the time, as everywhere: who cannot sign learns nothing.
	want, err := c.sign(ctx, auth, secret, date)
	if err != nil {
		return caller{}, err
	}
	if !hmac.Equal([]byte(want), []byte(auth.signature)) {
		return caller{}, mismatch("The request signature we calculated does not match the signature you provided.")
	}
	if skew := c.clock().Sub(date); skew > maxSkew || skew < -maxSkew {
		return caller{}, mismatch("Signature expired or not yet current: %s, and it is %s here", date.Format(amzDate), c.clock().UTC().Format(amzDate))
	}
	return who, nil
}

func mismatch(format string, args ...any) *stsError {
	return &stsError{http.StatusForbidden, "SignatureDoesNotMatch", fmt.Sprintf(format, args...)}
}

// identify finds whose an access key is, and its secret.
func (s *service) identify(ctx context.Context, key, token string) (caller, string, error) {
	unknown := &stsError{http.StatusForbidden, "InvalidClientTokenId", "The security token included in the request is invalid"}
	if key == s.root.AccessKeyID && token == "" {
		return caller{arn: "arn:aws:iam::" + account + ":root", id: account, root: true}, s.root.SecretAccessKey, nil
	}
	if strings.HasPrefix(key, "ASIA") {
		if s.store.ended(key) {
			return caller{}, "", &stsError{http.StatusForbidden, "ExpiredToken", "The security token included in the request is expired"}
		}
		session, err := s.store.GetSession(ctx, key)
		if err != nil || !hmac.Equal([]byte(session.SessionToken), []byte(token)) {
			return caller{}, "", unknown
		}
		who := caller{session: session, arn: "arn:aws:sts::" + account + ":assumed-role/" + session.RoleName + "/" + session.RoleSessionName,
			id: session.RoleID + ":" + session.RoleSessionName}
		if strings.HasPrefix(session.RoleName, federated) {
			who.arn, who.id = federatedARN(session.RoleSessionName), account+":"+session.RoleSessionName
		}
		return who, session.SecretAccessKey, nil
	}
	user, err := s.store.GetUserByAccessKeyID(ctx, key)
	if err != nil || token != "" {
		return caller{}, "", unknown
	}
	for _, k := range user.AccessKeys {
		if k.AccessKeyId == key && k.Status == "Active" {
			return caller{arn: user.Arn, id: user.UserID, user: user}, k.SecretAccessKey, nil
		}
	}
	return caller{}, "", unknown
}

// sign is the signature that the request must have.
func (c *call) sign(ctx context.Context, auth authorization, secret string, at time.Time) (string, error) {
	again, err := http.NewRequestWithContext(ctx, c.request.Method, "http://"+c.request.Host+c.request.URL.RequestURI(), nil)
	if err != nil {
		return "", err
	}
	keys := aws.Credentials{AccessKeyID: auth.key, SecretAccessKey: secret}
	for _, name := range auth.signed {
		switch name {
		case "host", "x-amz-date": // the signer's own
		case "content-length":
			again.ContentLength = c.request.ContentLength
		case strings.ToLower(tokenHeader):
			keys.SessionToken = c.request.Header.Get(tokenHeader)
		default:
			again.Header[http.CanonicalHeaderKey(name)] = c.request.Header.Values(name)
		}
	}
	sum := sha256.Sum256(c.body)
	if err := v4.NewSigner().SignHTTP(ctx, keys, again, hex.EncodeToString(sum[:]), auth.service, auth.region, at); err != nil {
		return "", fmt.Errorf("s3server: signing again: %w", err)
	}
	own, fail := parseAuthorization(again.Header.Get("Authorization"))
	if fail != nil {
		return "", fail
	}
	return own.signature, nil
}
