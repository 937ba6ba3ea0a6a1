package creds

import (
	"fmt"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// checkStatic refuses credentials that a client with static keys cannot use for as long as its mount lives: those of sessions expire, and
// the driver's own can be replaced at any time. The keys of a secret change only with the secret, which starts another client.
func checkStatic(cl client.Client, r session.Request) error {
	if !cl.StaticKeys {
		return nil
	}
	scope, err := r.Backend.ScopeOf(r.Scope)
	switch {
	case err != nil:
		return err
	case r.Source != credentials.SourceSecret:
		return staticError(cl, "the volume has credentials: %s; give it keys of a secret (credentials: secret)", r.Source)
	case r.Keys.SessionToken != "":
		return staticError(cl, "the volume's secret has a %s, so its keys expire; give it keys of a user", credentials.SecretSessionToken)
	case scope == volume.ScopeRequired:
		return staticError(cl, "scope: required of the volume or its backend needs sessions, which expire; use a client with credentials: endpoint")
	}
	return nil
}

func staticError(cl client.Client, format string, args ...any) error {
	return fault.See("docs/reference/declared-clients.md#static-keys", fault.Errorf(fault.Precondition, "client %s gets its keys once, when it starts "+
		"(clients.%s.credentials: static in the driver's config file), but %s", cl.Name, cl.Name, fmt.Sprintf(format, args...)))
}
