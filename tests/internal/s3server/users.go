package s3server

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"encoding/base64"
	"fmt"
	"time"

	"github.com/versity/versitygw/iamapi/storage"
	"github.com/versity/versitygw/iamapi/types"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// account is the gateway's one and only account id.
const account = "000000000000"

// policyName names the one inline policy that a test user has.
const policyName = "test"

// users writes to the IAM store that the gateway asks. The security token service makes its sessions in it too.
type users struct{ store storage.Storer }

func (u *users) add(ctx context.Context, name, policy string) (credentials.Keys, error) {
	_, err := u.store.CreateUser(ctx, types.User{
		Path: "/", UserName: name, UserID: "AIDA" + randomBase32(), CreateDate: time.Now().UTC(),
		Arn: UserARN(name),
	})
	if err != nil {
		return credentials.Keys{}, fmt.Errorf("s3server: user %s: %w", name, err)
	}
	if policy != "" {
		if err := u.setPolicy(ctx, name, policy); err != nil {
			return credentials.Keys{}, err
		}
	}
	return u.addKey(ctx, name)
}

func (u *users) setPolicy(ctx context.Context, name, policy string) error {
	err := u.store.PutUserPolicy(ctx, storage.PutUserPolicyInput{UserName: name, PolicyName: policyName, PolicyDocument: policy})
	if err != nil {
		return fmt.Errorf("s3server: policy of user %s: %w", name, err)
	}
	return nil
}

func (u *users) addKey(ctx context.Context, name string) (credentials.Keys, error) {
	keys := newKeys()
	_, err := u.store.CreateAccessKey(ctx, storage.CreateAccessKeyInput{
		UserName: name, AccessKeyID: keys.AccessKeyID, SecretAccessKey: keys.SecretAccessKey,
		Status: "Active", CreateDate: time.Now().UTC(),
	})
	if err != nil {
		return credentials.Keys{}, fmt.Errorf("s3server: key of user %s: %w", name, err)
	}
	return keys, nil
}

func (u *users) removeKey(ctx context.Context, name, accessKeyID string) error {
	if err := u.store.DeleteAccessKey(ctx, name, accessKeyID); err != nil {
		return fmt.Errorf("s3server: key %s of user %s: %w", accessKeyID, name, err)
	}
	return nil
}

// UserARN is the ARN of the user with that name.
func UserARN(name string) string { return "arn:aws:iam::" + account + ":user/" + name }

// newKeys makes keys that look like AWS's: tests that search logs for secrets must find what a real one looks like.
func newKeys() credentials.Keys {
	secret := make([]byte, 30)
	_, _ = rand.Read(secret) // never fails, see crypto/rand
	return credentials.Keys{AccessKeyID: "AKIA" + randomBase32(), SecretAccessKey: base64.StdEncoding.EncodeToString(secret)}
}

func randomBase32() string {
	b := make([]byte, 10)
	_, _ = rand.Read(b)
	return base32.StdEncoding.EncodeToString(b)
}
