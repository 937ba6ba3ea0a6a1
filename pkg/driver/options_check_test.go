package driver

import (
	"strings"
	"testing"
)

func TestModeCheckHasItsOwnFlagsAndThoseThatSayWhatIsChecked(t *testing.T) {
	o := parse(t, "check", nil)
	if o.Mode != ModeCheck || o.Check != (CheckOptions{Output: "table"}) || o.Common.Verbosity != 0 || o.Node.StateDir != "/run/s3-csi" || o.Node.UIDs.First == 0 {
		t.Errorf("defaults: %+v", o)
	}
	o = parse(t, "check --backend=lab --bucket=data --output=json --node --config=/etc/c.yaml --host-dir=/opt/y --launcher=process -v=4", map[string]string{"S3_CSI_STATE_DIR": "/run/x", "AWS_REGION": "eu-north-1"})
	if want := (CheckOptions{Backend: "lab", Bucket: "data", Output: "json", Node: true}); o.Check != want {
		t.Errorf("%+v, want %+v", o.Check, want)
	}
	if o.Common.Config != "/etc/c.yaml" || o.Common.Verbosity != 4 || o.Node.HostDir != "/opt/y" || o.Node.Launcher != "process" || o.Node.StateDir != "/run/x" || o.DefaultRegion != "eu-north-1" {
		t.Errorf("flags of other modes: %+v", o)
	}
	for args, want := range map[string]string{
		"check --output=xml":        "table, json",
		"check --bucket=A":          "--bucket",
		"check --backend=A":         "--backend",
		"check --endpoint=/x":       "is a flag of modes all and controller and node",
		"check --memory-limit=1Gi":  "is a flag of modes all and node",
		"controller --output=json":  "is a flag of modes check",
		"check node":                "unexpected argument",
		"check --launcher=upstart":  "--launcher",
		"check --uid-range=1-2":     "uid-range",
		"check --host-dir=relative": "--host-dir",
	} {
		_, err := Parse(strings.Fields(args), environment(nil))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v does not say %q", args, err, want)
		}
	}
}
