package driver

import (
	"strings"
	"testing"
	"time"
)

// refuseArgs checks that command lines are refused with a text.
func refuseArgs(t *testing.T, says map[string]string) {
	t.Helper()
	for args, want := range says {
		_, err := Parse(strings.Fields(args), environment(nil))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v does not say %q", args, err, want)
		}
	}
}

func TestModeCheck_Flags(t *testing.T) {
	o := parse(t, "check", nil)
	if o.Mode != ModeCheck || o.Check != (CheckOptions{Output: OutputText, StepTimeout: defaultStepTimeout}) || o.Common.Verbosity != 0 ||
		o.Node.StateDir != "/run/s3-csi" || o.Node.UIDs.First == 0 {
		t.Errorf("defaults: %+v", o)
	}
	o = parse(t, "check --backend=lab --bucket=data --output=json --node --config=/etc/c.yaml --host-dir=/opt/y --launcher=process -v=4",
		map[string]string{"S3_CSI_STATE_DIR": "/run/x", "AWS_REGION": "eu-north-1"})
	if want := (CheckOptions{Backend: "lab", Bucket: "data", Output: "json", Node: true, StepTimeout: defaultStepTimeout}); o.Check != want {
		t.Errorf("%+v, want %+v", o.Check, want)
	}
	o2 := parse(t, "check --role=arn:aws:iam::1:role/r --token-file=/t --bucket=data --prefix=a/", nil)
	if want := (CheckOptions{Bucket: "data", Output: OutputText, RoleARN: "arn:aws:iam::1:role/r", TokenFile: "/t", Prefix: "a/",
		StepTimeout: defaultStepTimeout}); o2.Check != want {
		t.Errorf("%+v, want %+v", o2.Check, want)
	}
	o3 := parse(t, "check --client=rclone --bucket=data --prefix=a --step-timeout=5s --session-duration=15m", nil)
	if want := (CheckOptions{Bucket: "data", Output: OutputText, Prefix: "a", Client: "rclone", StepTimeout: 5 * time.Second,
		SessionDuration: 15 * time.Minute}); o3.Check != want {
		t.Errorf("%+v, want %+v", o3.Check, want)
	}
	if !parse(t, "check --create-bucket", nil).Check.CreateBucket {
		t.Error("--create-bucket has no effect")
	}
	if o.Common.Config != "/etc/c.yaml" || o.Common.Verbosity != 4 || o.Node.HostDir != "/opt/y" || o.Node.Launcher != "process" ||
		o.Node.StateDir != "/run/x" || o.DefaultRegion != "eu-north-1" {
		t.Errorf("flags of other modes: %+v", o)
	}
	refuseArgs(t, map[string]string{
		"check --output=xml":                         "text, json",
		"check --output=table":                       "text, json",
		"check --bucket=A":                           "--bucket",
		"check --backend=A":                          "--backend",
		"check --endpoint=/x":                        "is a flag of modes all and controller and node",
		"check --memory-limit=1Gi":                   "is a flag of modes all and node",
		"controller --output=json":                   "is a flag of modes check and status and volumes",
		"check --create-bucket --bucket=data":        "--create-bucket",
		"check --role=r":                             "--role",
		"check --token-file=/t":                      "--role",
		"check --role=r --token-file=/t --prefix=a":  "--prefix",
		"check node":                                 "unexpected argument",
		"check --launcher=upstart":                   "--launcher",
		"check --uid-range=1-2":                      "uid-range",
		"check --host-dir=relative":                  "--host-dir",
		"check --client=rclone":                      "--client: needs --bucket",
		"check --client=R --bucket=data":             "--client",
		"check --client=rclone --bucket=data --node": "--node",
		"check --client=rclone --create-bucket":      "--create-bucket",
		"check --client=rclone --bucket=data --role=r --token-file=/t": "--role",
		"check --client=rclone --bucket=data --step-timeout=1ms":       "--step-timeout",
		"check --step-timeout=9s":                                      "--step-timeout: needs --client",
		"check --session-duration=15m":                                 "--session-duration: needs --client",
		"check --client=rclone --bucket=data --session-duration=1ms":   "--session-duration",
		"check --client=rclone --bucket=data --session-duration=37h":   "--session-duration",
		"check --prefix=a --bucket=data":                               "--prefix",
	})
}

func TestModeStatus_Flags(t *testing.T) {
	o := parse(t, "status -o json --pod=a/b --client-output", map[string]string{"S3_CSI_STATE_DIR": "/run/x"})
	if o.Mode != ModeStatus || o.Status != (StatusOptions{OutputJSON, "a/b", true}) || o.Node.StateDir != "/run/x" || o.Common.Verbosity != 0 {
		t.Errorf("%+v", o)
	}
	if o := parse(t, "status", nil); o.Status.Output != OutputText {
		t.Errorf("default: %+v", o.Status)
	}
	refuseArgs(t, map[string]string{
		"status --output=table":       "text, json, name",
		"status --config=/etc/c":      "is a flag of modes",
		"status --state-dir=run":      "--state-dir",
		"status --memory-limit=1Gi":   "is a flag of modes all and node",
		"status --node":               "is a flag of modes check",
		"state":                       "unknown mode",
		"status now":                  "unexpected argument",
		"check --volume-attach-limit": "is a flag of modes all and node",
	})
}

func TestModeVolumes_Flags(t *testing.T) {
	o := parse(t, "volumes -o json --backend=lab --all", map[string]string{"S3_CSI_CLUSTER_ID": "prod", "S3_CSI_DRIVER_NAME": "x.csi",
		"S3_CSI_CONFIG": "/etc/c.yaml", "AWS_REGION": "eu-north-1"})
	if o.Mode != ModeVolumes || o.Volumes != (VolumesOptions{OutputJSON, "lab", true}) || o.Controller.ClusterID != "prod" ||
		o.Common.DriverName != "x.csi" || o.Common.Config != "/etc/c.yaml" || o.DefaultRegion != "eu-north-1" {
		t.Errorf("%+v", o)
	}
	refuseArgs(t, map[string]string{
		"volumes --output=table":       "text, json",
		"volumes --backend=A":          "--backend",
		"volumes --cluster-id=a/b":     "--cluster-id",
		"volumes --deletion-workers=2": "is a flag of modes all and controller",
		"volumes --state-dir=/run/x":   "is a flag of modes",
	})
}
