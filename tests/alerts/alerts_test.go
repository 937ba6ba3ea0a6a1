// Package alerts holds the chart's alerts against what Prometheus makes of them.
package alerts

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/promqltest"
)

func rules(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile("../../charts/s3-csi-driver/alerts.yaml", false, model.UTF8Validation)
	if len(errs) > 0 || len(groups.Groups) != 1 || len(groups.Groups[0].Rules) < 12 {
		t.Fatal(groups, errs)
	}
	return groups.Groups[0].Rules
}

func TestRulesAreDescribed(t *testing.T) {
	page, err := os.ReadFile("../../docs/how-to/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, rule := range rules(t) {
		if !slices.Contains([]string{"critical", "warning"}, rule.Labels["severity"]) {
			t.Errorf("%s has the severity %q", rule.Alert, rule.Labels["severity"])
		}
		if rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" {
			t.Errorf("%s is not described: %v", rule.Alert, rule.Annotations)
		}
		if _, anchor, _ := strings.Cut(rule.Annotations["runbook_url"], "docs/how-to/monitoring.md#"); anchor != strings.ToLower(rule.Alert) {
			t.Errorf("%s leads to %q", rule.Alert, rule.Annotations["runbook_url"])
		}
		if !strings.Contains(string(page), "\n### "+rule.Alert+"\n") {
			t.Errorf("docs/how-to/monitoring.md has no heading %s", rule.Alert)
		}
	}
}

// Each alert's expression has a result for what it is for, and none for what is normal.
func TestAlertsFire(t *testing.T) {
	const publish = `csi_plugin_operations_seconds_count{method_name="/csi.v1.Node/NodePublishVolume", grpc_status_code=`
	const bucket = `csi_plugin_operations_seconds_bucket{method_name="/csi.v1.Node/NodePublishVolume", grpc_status_code="OK", le=`
	for alert, series := range map[string]struct{ bad, good string }{
		"S3VolumeUnavailable":     {`s3csi_mounts{client="rclone", state="failed"} 0x60 1x60`, `s3csi_mounts{client="rclone", state="healthy"} 5x120`},
		"S3VolumeDataMayBeLost":   {`s3csi_mount_unflushed_total _x100 1x20`, `s3csi_mount_unflushed_total 1x120`},
		"S3VolumeSessionExpired":  {`s3csi_mount_sessions{state="expired"} 1x120`, `s3csi_mount_sessions{state="valid"} 1x120`},
		"S3VolumeSessionFailing":  {`s3csi_mount_sessions{state="failing"} 2x120`, `s3csi_mount_sessions{state="failing"} 0x120`},
		"S3VolumeClientCrashLoop": {`s3csi_mount_restarts_total{reason="oom"} 0+1x120`, `s3csi_mount_restarts_total{reason="oom"} 1x120`},
		"S3VolumeNotHealed":       {`s3csi_mount_heals_total{result="failed"} _x100 1x20`, `s3csi_mount_heals_total{result="done"} 0+1x120`},
		"S3VolumeDrainsLong":      {`s3csi_mounts{state="draining"} 1x120`, `s3csi_mounts{state="draining"} 0x120`},
		"S3VolumePublishFails":    {publish + `"Unavailable"} 0+1x120`, publish + `"Aborted"} 0+1x120`},
		"S3VolumePublishSlow": {bucket + `"10"} 0x120` + "\n  " + bucket + `"60"} 0+1x120` + "\n  " + bucket + `"+Inf"} 0+1x120`,
			bucket + `"10"} 0+1x120` + "\n  " + bucket + `"+Inf"} 0+1x120`},
		"S3VolumeProvisioningFails": {`csi_plugin_operations_seconds_count{method_name="/csi.v1.Controller/CreateVolume", grpc_status_code="Internal"} 0+1x120`,
			`csi_plugin_operations_seconds_count{method_name="/csi.v1.Controller/CreateVolume", grpc_status_code="OK"} 0+1x120`},
		"S3DriverConfigRefused":          {`s3csi_config_last_reload_successful 0x120`, `s3csi_config_last_reload_successful 1x120`},
		"S3DriverFileSystemUnresponsive": {`s3csi_overdue_calls 1x120`, `s3csi_overdue_calls 0x120`},
	} {
		t.Run(alert, func(t *testing.T) {
			rule := ruleOf(t, alert)
			count := func(series, want string) {
				promqltest.RunTest(t, "load 1m\n  "+series+"\n\neval instant at 110m count("+rule.Expr+") or vector(0)\n  "+want+"\n",
					promqltest.NewTestEngine(t, false, 0, 1e6))
			}
			count(series.bad, "{} 1")
			count(series.good, "{} 0")
		})
	}
}

func ruleOf(t *testing.T, alert string) rulefmt.Rule {
	t.Helper()
	for _, rule := range rules(t) {
		if rule.Alert == alert {
			return rule
		}
	}
	t.Fatalf("there is no alert %s", alert)
	return rulefmt.Rule{}
}

// The queries that the page on monitoring shows are ones.
func TestDocumentedQueries(t *testing.T) {
	page, err := os.ReadFile("../../docs/how-to/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```promql\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	if len(blocks) == 0 {
		t.Fatal("there are none")
	}
	const load = `load 1m
  s3csi_volume_read_bytes_total{instance="n", mount="m", volume="v"} 0+60x10
  s3csi_volume_mount_info{instance="n", mount="m", volume="v", persistentvolume="pv"} 1x10
  kube_persistentvolumeclaim_info{instance="ksm", namespace="team", persistentvolumeclaim="data", volumename="pv"} 1x10

eval instant at 10m `
	for _, block := range blocks {
		query := strings.Join(strings.Fields(block[1]), " ")
		promqltest.RunTest(t, load+query+"\n  {namespace=\"team\", persistentvolumeclaim=\"data\"} 1\n", promqltest.NewTestEngine(t, false, 0, 1e6))
	}
}
