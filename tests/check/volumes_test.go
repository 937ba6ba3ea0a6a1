package check

import (
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/inventory"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// The command volumes shows what a controller has created, with the same config file, and fails if something cannot be read.
func TestVolumes(t *testing.T) {
	server := rigtest.StartServer(t, s3server.Options{})
	backends := "  lab:\n    endpoint: " + server.Endpoint() + "\n    region: " + server.Region() + "\n    addressing: path\n"
	record := `{"version":1,"driver":"s3.csi.driver","cluster":"c","name":"v","volumeID":"lab:` + rigtest.Bucket + `/v/",` +
		`"parametersDigest":"x","onDelete":"delete","state":"deleting",` +
		`"generation":1,"firstPrefix":"v/","created":"2026-01-01T00:00:00Z","updated":"2026-01-01T00:00:00Z"}`
	server.Put(t, rigtest.Bucket, ".s3-csi/volumes/v", record)
	volumes := func(args ...string) (inventory.Document, int) {
		t.Helper()
		cmd := command(t, server.Process.Keys(), backends, append([]string{"-o", "json"}, args...)...)
		cmd.Args[1] = "volumes"
		out, err := cmd.Output()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		var d inventory.Document
		if err := json.Unmarshal(out, &d); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if strings.Contains(string(out), server.Process.Keys().SecretAccessKey) {
			t.Error("the output has a secret key")
		}
		return d, cmd.ProcessState.ExitCode()
	}
	d, code := volumes("--cluster-id=c")
	if code != 0 || len(d.Volumes) != 1 || !d.Volumes[0].Own || d.Volumes[0].State != "deleting" || d.Volumes[0].Problem == "" {
		t.Errorf("%d, %+v", code, d)
	}
	if d, _ := volumes(); len(d.Volumes) != 1 || d.Volumes[0].Own {
		t.Errorf("of another cluster: %+v", d)
	}
	backends += "    controllerCredentials: secret\n"
	if d, code := volumes(); code != 1 || len(d.Unread) != 1 {
		t.Errorf("unreadable: %d, %+v", code, d)
	}
}
