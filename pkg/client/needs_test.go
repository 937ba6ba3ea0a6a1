package client

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/policy"
)

func TestNeedsAreWhatTheCommandLineLetsTheClientDo(t *testing.T) {
	for _, tc := range []struct {
		name, client string
		options      []string
		readOnly     bool
		want         policy.Needs
	}{
		{"Mountpoint removes files unless it is told not to", "mountpoint-s3", nil, false, policy.Needs{Delete: true}},
		{"said again", "mountpoint-s3", []string{"allow-delete"}, false, policy.Needs{Delete: true}},
		{"turned off", "mountpoint-s3", []string{"allow-delete=false"}, false, policy.Needs{}},
		{"an overwrite is no removal", "mountpoint-s3", []string{"allow-delete=false", "allow-overwrite"}, false, policy.Needs{}},
		{"nothing on a read-only mount, whatever the options say", "mountpoint-s3", []string{"allow-delete"}, true, policy.Needs{}},
		{"rclone always removes and renames", "rclone", nil, false, policy.Needs{Delete: true}},
		{"but not on a read-only mount", "rclone", nil, true, policy.Needs{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := Get(tc.client)
			must(t, err)
			if got := c.Needs(options(tc.options...), tc.readOnly); got != tc.want {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestEveryClientSaysWhatItNeeds(t *testing.T) {
	for _, c := range All() {
		if c.access == nil {
			t.Errorf("client %s does not", c.Name)
		}
	}
}
