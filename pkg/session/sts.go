package session

import (
	"context"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/aws/aws-sdk-go-v2/service/sts/types"
	"github.com/aws/smithy-go/logging"
	"github.com/aws/smithy-go/middleware"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// attempts bounds the attempts for one order.
const attempts = 5

// stsCall is the request for one order.
type stsCall struct {
	sent time.Time // when the last attempt started
	last error     // the last response of the service
}

// ask exchanges an order for a session.
func (m *Maker) ask(ctx context.Context, s *service, o credentials.Order) (credentials.Keys, error) {
	a := &stsCall{}
	client := m.client(s, o, a)
	answer, metadata, user, err := exchange(ctx, client, o)
	if err != nil {
		return credentials.Keys{}, a.explain(ctx, o, err)
	}
	if answer == nil || aws.ToString(answer.AccessKeyId) == "" || aws.ToString(answer.SecretAccessKey) == "" || aws.ToString(answer.SessionToken) == "" {
		return credentials.Keys{}, unusable(o, "the response has no session")
	}
	server, _ := awsmiddleware.GetServerTime(metadata)
	keys := credentials.Keys{
		AccessKeyID:     *answer.AccessKeyId,
		SecretAccessKey: *answer.SecretAccessKey,
		SessionToken:    *answer.SessionToken,
		Account:         accountOf(user),
	}
	if answer.Expiration != nil {
		if keys.Expires = localEnd(*answer.Expiration, server, a.sent, m.now()); !keys.Expires.After(m.now()) {
			return credentials.Keys{}, unusable(o, "the session had already expired")
		}
	}
	return keys, nil
}

// exchange sends the order's request and returns the session, the metadata of the response and the ARN of the session's user.
func exchange(ctx context.Context, client *sts.Client, o credentials.Order) (*types.Credentials, middleware.Metadata, string, error) {
	var seconds *int32
	if o.Duration > 0 {
		seconds = aws.Int32(int32(o.Duration.Round(time.Second) / time.Second))
	}
	switch o.Kind {
	case credentials.WebIdentity:
		out, err := client.AssumeRoleWithWebIdentity(ctx, &sts.AssumeRoleWithWebIdentityInput{
			RoleArn: aws.String(o.RoleARN), RoleSessionName: &o.Name, WebIdentityToken: &o.Token, Policy: backend.Optional(o.Policy), DurationSeconds: seconds,
		})
		if err != nil {
			return nil, middleware.Metadata{}, "", err
		}
		return out.Credentials, out.ResultMetadata, assumed(out.AssumedRoleUser), nil
	case credentials.FederationToken:
		out, err := client.GetFederationToken(ctx, &sts.GetFederationTokenInput{Name: &o.Name, Policy: backend.Optional(o.Policy), DurationSeconds: seconds})
		if err != nil {
			return nil, middleware.Metadata{}, "", err
		}
		user := ""
		if out.FederatedUser != nil {
			user = aws.ToString(out.FederatedUser.Arn)
		}
		return out.Credentials, out.ResultMetadata, user, nil
	default:
		out, err := client.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: aws.String(o.RoleARN), RoleSessionName: &o.Name, Policy: backend.Optional(o.Policy),
			DurationSeconds: seconds})
		if err != nil {
			return nil, middleware.Metadata{}, "", err
		}
		return out.Credentials, out.ResultMetadata, assumed(out.AssumedRoleUser), nil
	}
}

func assumed(u *types.AssumedRoleUser) string {
	if u == nil {
		return ""
	}
	return aws.ToString(u.Arn)
}

// client returns a client for this order alone. It signs with the order's keys and ignores this process's environment.
func (m *Maker) client(s *service, o credentials.Order, a *stsCall) *sts.Client {
	return sts.New(sts.Options{}, func(c *sts.Options) {
		c.Region = o.STS.Region
		if o.STS.Endpoint != "" {
			c.BaseEndpoint = aws.String(o.STS.Endpoint)
		}
		if o.STS.FIPS {
			c.EndpointOptions.UseFIPSEndpoint = aws.FIPSEndpointStateEnabled
		}
		if o.STS.DualStack {
			c.EndpointOptions.UseDualStackEndpoint = aws.DualStackEndpointStateEnabled
		}
		c.Credentials = aws.AnonymousCredentials{}
		if o.Kind != credentials.WebIdentity {
			c.Credentials = awscredentials.NewStaticCredentialsProvider(o.Keys.AccessKeyID, o.Keys.SecretAccessKey, o.Keys.SessionToken)
		}
		c.HTTPClient = s.http
		c.Logger = logging.Nop{}
		c.Retryer = retry.NewStandard(func(r *retry.StandardOptions) {
			r.MaxAttempts, r.MaxBackoff = attempts, m.backoff
			r.Retryables = append([]retry.IsErrorRetryable{retry.IsErrorRetryableFunc(a.retryable)}, r.Retryables...)
		})
		c.APIOptions = append(c.APIOptions, awsmiddleware.AddUserAgentKeyValue("s3-csi-driver", m.userAgent), a.time, backend.BoundAnswers)
	})
}

// time records when each attempt starts.
func (a *stsCall) time(s *middleware.Stack) error {
	return s.Deserialize.Add(middleware.DeserializeMiddlewareFunc("TimeOfAttempt", func(ctx context.Context, in middleware.DeserializeInput,
		next middleware.DeserializeHandler) (middleware.DeserializeOutput, middleware.Metadata, error) {
		a.sent = time.Now()
		return next.HandleDeserialize(ctx, in)
	}), middleware.After)
}

// retryable records the response to an attempt, and adds to what the SDK retries.
func (a *stsCall) retryable(err error) aws.Ternary {
	switch code := backend.ErrorCode(err); {
	case code == "" && backend.WrongServer(err):
		return aws.FalseTernary
	case code == "":
	case code == "IDPCommunicationError", code == backend.ThrottledCode:
		a.last = err
		return aws.TrueTernary
	default:
		a.last = err
	}
	return aws.UnknownTernary
}

// accountOf returns the account in arn:<partition>:sts::<account>:…, or "".
func accountOf(arn string) string {
	p := strings.SplitN(arn, ":", 6)
	if len(p) != 6 || p[0] != "arn" || p[2] != "sts" || !credentials.IsAccount(p[4]) {
		return ""
	}
	return p[4]
}

// localEnd returns when a session expires by this machine's clock. end and server are by the service's clock: server is the
// response's Date header, in whole seconds and rounded down; zero is unknown. The attempt was sent at sent and its response arrived before now.
//
// If the clocks may agree, the result is end. Otherwise the validity is counted from sent, so that it is never too long.
func localEnd(end, server, sent, now time.Time) time.Time {
	if server.IsZero() || !server.Before(sent.Add(-time.Second)) && !server.After(now) {
		return end.UTC()
	}
	return sent.Add(end.Sub(server) - time.Second).UTC().Round(0)
}
