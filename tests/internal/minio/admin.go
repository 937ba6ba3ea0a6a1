package minio

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// AddUser makes a user who may do what the IAM policy document says. The access key is the user's name, so a user of MinIO
// has one key; replacing the secret is SetSecret.
func (s *Server) AddUser(ctx context.Context, name, policy string) (keys credentials.Keys, err error) {
	// A MinIO that has just started may read its store again, and forget for a moment what was added meanwhile.
	for range addTries {
		if keys, err = s.addUser(ctx, name, policy); err == nil {
			return keys, nil
		}
		select {
		case <-time.After(addPause):
		case <-ctx.Done():
			return credentials.Keys{}, err
		}
	}
	return credentials.Keys{}, err
}

const (
	addTries = 10
	addPause = 200 * time.Millisecond
)

func (s *Server) addUser(ctx context.Context, name, policy string) (credentials.Keys, error) {
	if err := s.admin(ctx, http.MethodPut, "add-canned-policy", url.Values{"name": {name}}, []byte(policy)); err != nil {
		return credentials.Keys{}, err
	}
	keys, err := s.SetSecret(ctx, name)
	if err != nil {
		return credentials.Keys{}, err
	}
	return keys, s.admin(ctx, http.MethodPut, "set-user-or-group-policy",
		url.Values{"policyName": {name}, "userOrGroup": {name}, "isGroup": {"false"}}, nil)
}

// SetSecret gives a user another secret, at once.
func (s *Server) SetSecret(ctx context.Context, name string) (credentials.Keys, error) {
	keys := credentials.Keys{AccessKeyID: name, SecretAccessKey: random(20)}
	body, err := json.Marshal(map[string]string{"secretKey": keys.SecretAccessKey, "status": "enabled"})
	if err != nil {
		return credentials.Keys{}, err
	}
	sealed, err := seal(s.root.SecretAccessKey, body)
	if err != nil {
		return credentials.Keys{}, fmt.Errorf("minio: %w", err)
	}
	return keys, s.admin(ctx, http.MethodPut, "add-user", url.Values{"accessKey": {name}}, sealed)
}

// RemoveUser takes a user away, with all sessions.
func (s *Server) RemoveUser(ctx context.Context, name string) error {
	return s.admin(ctx, http.MethodDelete, "remove-user", url.Values{"accessKey": {name}}, nil)
}

// admin calls MinIO's admin API, whose client is a large module for four calls.
func (s *Server) admin(ctx context.Context, method, call string, query url.Values, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, method, s.endpoint+"/minio/admin/v3/"+call+"?"+query.Encode(), bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("minio: %w", err)
	}
	sum := sha256.Sum256(body)
	hash := hex.EncodeToString(sum[:])
	req.Header.Set("X-Amz-Content-Sha256", hash)
	keys := aws.Credentials{AccessKeyID: s.root.AccessKeyID, SecretAccessKey: s.root.SecretAccessKey}
	if err := v4.NewSigner().SignHTTP(ctx, keys, req, hash, "s3", Region, time.Now()); err != nil {
		return fmt.Errorf("minio: %s: %w", call, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("minio: %s: %w", call, err)
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("minio: %s: %s: %s %w", call, resp.Status, said, err)
	}
	return nil
}

// How secrets are sent to the admin API (madmin-go and sio-go, as documented in their source): salt, the id of the way, a
// nonce, and fragments of AES-GCM. Secrets fit into the first, which is the last too.
const (
	sealSalt     = 32
	sealNonce    = 8
	sealByPBKDF2 = 2
	sealRounds   = 8192
	lastFragment = 0x80
)

func seal(password string, plain []byte) ([]byte, error) {
	salt, nonce := make([]byte, sealSalt), make([]byte, sealNonce)
	_, _ = rand.Read(salt) // never fails, see crypto/rand
	_, _ = rand.Read(nonce)
	key, err := pbkdf2.Key(sha256.New, password, salt, sealRounds, 32)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	// Each fragment's nonce ends in its number; the first, of nothing, makes the tag that the others are bound to.
	number := func(n byte) []byte { return slices.Concat(nonce, []byte{n, 0, 0, 0}) }
	bound := gcm.Seal([]byte{lastFragment}, number(0), nil, nil)
	return gcm.Seal(slices.Concat(salt, []byte{sealByPBKDF2}, nonce), number(1), plain, bound), nil
}
