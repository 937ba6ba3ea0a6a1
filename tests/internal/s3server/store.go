package s3server

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/versity/versitygw/iamapi/storage"
	"github.com/versity/versitygw/iamapi/types"
)

// store is the gateway's IAM store with what it lacks for a security token service: sessions of users, which
// GetFederationToken makes, and sessions that are taken back. The gateway's store is a file that it parses several times for every
// request. So sessions are in memory alone, and so is what a request asks for, until something is written.
type store struct {
	storage.Storer

	mu       sync.Mutex
	sessions map[string]types.Session // by access key, ended ones too: they differ from those that never existed
	revoked  map[string]time.Time     // by ARN of role or user: sessions made before that time are over
	users    map[string]types.User    // by name
	owners   map[string]types.User    // by access key
	roles    map[string]types.Role    // by name
}

// federated begins the name of the role that stands for a user in the user's sessions. No role can have it: a colon is not
// allowed there.
const federated = "user:"

func newStore(s storage.Storer) *store {
	return &store{
		Storer: s, sessions: map[string]types.Session{}, revoked: map[string]time.Time{},
		users: map[string]types.User{}, owners: map[string]types.User{}, roles: map[string]types.Role{},
	}
}

// GetUser finds the user with that name.
func (s *store) GetUser(ctx context.Context, name string) (*types.User, error) {
	return remembered(ctx, s, s.users, name, s.Storer.GetUser)
}

// GetUserByAccessKeyID finds the user who has that key.
func (s *store) GetUserByAccessKeyID(ctx context.Context, accessKeyID string) (*types.User, error) {
	return remembered(ctx, s, s.owners, accessKeyID, s.Storer.GetUserByAccessKeyID)
}

// remembered is the value of a key, which read finds if it is not known yet. What is not found is not remembered.
func remembered[T any](ctx context.Context, s *store, known map[string]T, key string, read func(context.Context, string) (*T, error)) (*T, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v, ok := known[key]; ok {
		return &v, nil
	}
	v, err := read(ctx, key)
	if err != nil {
		return nil, err
	}
	known[key] = *v
	return v, nil
}

// change does a write, and forgets what was read before.
func (s *store) change(write func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.users)
	clear(s.owners)
	clear(s.roles)
	return write()
}

// PutUserPolicy writes a user's policy.
func (s *store) PutUserPolicy(ctx context.Context, in storage.PutUserPolicyInput) error {
	return s.change(func() error { return s.Storer.PutUserPolicy(ctx, in) })
}

// CreateAccessKey makes a user's key.
func (s *store) CreateAccessKey(ctx context.Context, in storage.CreateAccessKeyInput) (key *types.AccessKey, err error) {
	err = s.change(func() error {
		key, err = s.Storer.CreateAccessKey(ctx, in)
		return err
	})
	return key, err
}

// DeleteAccessKey removes a user's key.
func (s *store) DeleteAccessKey(ctx context.Context, user, accessKeyID string) error {
	return s.change(func() error { return s.Storer.DeleteAccessKey(ctx, user, accessKeyID) })
}

// PutRolePolicy writes a role's policy.
func (s *store) PutRolePolicy(ctx context.Context, in storage.PutRolePolicyInput) error {
	return s.change(func() error { return s.Storer.PutRolePolicy(ctx, in) })
}

// RecordAccessKeyUsage does nothing: no test asks when a key was last used.
func (s *store) RecordAccessKeyUsage(context.Context, string, string, string, time.Time) error {
	return nil
}

// RecordRoleUsage does nothing, like RecordAccessKeyUsage.
func (s *store) RecordRoleUsage(context.Context, string, string, time.Time) error { return nil }

// GetRole is asked for the policies of every session. For a user's session they are the user's of now.
func (s *store) GetRole(ctx context.Context, name string) (*types.Role, error) {
	user, ok := strings.CutPrefix(name, federated)
	if !ok {
		return remembered(ctx, s, s.roles, name, s.Storer.GetRole)
	}
	u, err := s.GetUser(ctx, user)
	if err != nil {
		return nil, err
	}
	return &types.Role{Path: "/", RoleName: name, RoleID: u.UserID, Arn: u.Arn, Policies: u.Policies}, nil
}

// GetSession finds no session that has ended or was taken back.
func (s *store) GetSession(_ context.Context, accessKeyID string) (*types.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	session, ok := s.sessions[accessKeyID]
	if !ok || !session.Expiration.After(time.Now()) || !session.CreateDate.After(s.revoked[session.RoleArn]) {
		return nil, storage.ErrSessionNotFound
	}
	return &session, nil
}

// CreateSession keeps a session.
func (s *store) CreateSession(_ context.Context, session types.Session) (*types.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions[session.AccessKeyId] = session
	return &session, nil
}

// ended reports whether there was a session of that key and its time is over.
func (s *store) ended(accessKeyID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	session, ok := s.sessions[accessKeyID]
	return ok && !session.Expiration.After(time.Now())
}

func (s *store) revoke(arn string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revoked[arn] = time.Now()
}

// setRole makes a role, or gives one that is there another policy.
func (s *store) setRole(ctx context.Context, name, policy string) (arn string, err error) {
	arn = RoleARN(name)
	if _, err := s.Storer.GetRole(ctx, name); err != nil {
		_, err = s.CreateRole(ctx, types.Role{
			Path: "/", RoleName: name, RoleID: "AROA" + randomBase32(), Arn: arn, CreateDate: time.Now().UTC(), MaxSessionDuration: 43200,
			AssumeRolePolicyDocument: `{"Version":"2012-10-17","Statement":[]}`, // who may is for the front to judge
		})
		if err != nil {
			return "", fmt.Errorf("s3server: role %s: %w", name, err)
		}
	}
	if policy == "" {
		policy = nothing
	}
	err = s.PutRolePolicy(ctx, storage.PutRolePolicyInput{RoleName: name, PolicyName: policyName, PolicyDocument: policy})
	if err != nil {
		return "", fmt.Errorf("s3server: policy of role %s: %w", name, err)
	}
	return arn, nil
}

// nothing is a policy that allows nothing.
const nothing = `{"Version":"2012-10-17","Statement":[{"Effect":"Deny","Action":"*","Resource":"*"}]}`

// RoleARN is the ARN of the role with that name.
func RoleARN(name string) string { return "arn:aws:iam::" + account + ":role/" + name }
