package creds

import (
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// Trouble returns what is wrong with a mount's session: it has expired, or it cannot be renewed for a reason that is permanent. A
// token service that does not answer is no trouble as long as the session lasts.
func Trouble(m state.Mount, status helper.Status) error {
	s := status.Session
	if s == nil || s.Error == "" && !s.Over {
		return nil
	}
	cause := s.Fault()
	kind := fault.KindOf(cause)
	switch {
	case s.Over && cause == nil && s.OrderDigest != "":
		return fault.Errorf(fault.Unavailable, "the session of mount %s (volume %s) expired at %s; it is being renewed", m.Name, m.VolumeID, Time(s.Expires))
	case s.Over && cause == nil:
		return fault.Errorf(fault.Unauthenticated, "the session of mount %s (volume %s) expired at %s, and there is nothing to renew it with: %s", m.Name, m.VolumeID, Time(s.Expires), Remedy(m))
	case s.Over:
		return fault.Errorf(kind, "the session of mount %s (volume %s) expired at %s and could not be renewed since %s: %w; %s", m.Name, m.VolumeID, Time(s.Expires), Time(s.FailedSince), cause, Remedy(m))
	case kind.Permanent():
		return fault.Errorf(kind, "the session of mount %s (volume %s) expires at %s and its renewal is refused since %s: %w; %s", m.Name, m.VolumeID, Time(s.Expires), Time(s.FailedSince), cause, Remedy(m))
	}
	return nil
}

// Time formats a time for people.
func Time(t time.Time) string {
	if t.IsZero() {
		return "an unknown time"
	}
	return t.UTC().Format(time.RFC3339)
}

// Remedy returns what to do about a session that cannot be renewed.
func Remedy(m state.Mount) string {
	const retry = "the helper retries and recovers by itself"
	switch m.Spec.Source {
	case credentials.SourceSecret:
		return "correct the keys in the volume's secret, or their owner's permissions; each publication brings the secret again, and " + retry
	case credentials.SourceWorkload:
		return "check that the role trusts service account " + m.Spec.Identity + " and that kubelet republishes the volume (requiresRepublish: true), which brings new tokens; " + retry
	}
	return "correct the driver's own credentials, or the role's trust policy; " + retry
}
