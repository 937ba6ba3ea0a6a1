package driver

import (
	"os"
	"path"
	"regexp"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func nomadFile(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile("../../deploy/nomad/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// between returns what is between two texts of a file.
func between(t *testing.T, file, from, to string) string {
	t.Helper()
	_, rest, ok := strings.Cut(file, from)
	inside, _, closed := strings.Cut(rest, to)
	if !ok || !closed {
		t.Fatalf("there is no %q … %q", from, to)
	}
	return inside
}

// settings returns the assignments of strings in a block.
func settings(block string) map[string]string {
	found := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\s*(\w+)\s*=\s*"([^"]*)"`).FindAllStringSubmatch(block, -1) {
		found[m[1]] = m[2]
	}
	return found
}

func TestNomad_PluginJob(t *testing.T) {
	job := nomadFile(t, "plugin.nomad.hcl")
	var args []string
	for _, m := range regexp.MustCompile(`"([^"]*)"`).FindAllStringSubmatch(between(t, job, "args = [", "]"), -1) {
		args = append(args, strings.ReplaceAll(m[1], "${node.unique.name}", "node-1"))
	}
	o := parse(t, strings.Join(args, " "), nil)
	plugin := settings(between(t, job, "csi_plugin {", "}"))
	if o.Mode != ModeAll || plugin["type"] != "monolith" {
		t.Errorf("mode %s is a plugin of type %s", o.Mode, plugin["type"])
	}
	if want := path.Join(o.Node.TargetRoot, plugin["type"], plugin["id"]); plugin["stage_publish_base_dir"] != want {
		t.Errorf("stage_publish_base_dir is %s, want %s", plugin["stage_publish_base_dir"], want)
	}
	for _, needed := range []string{"privileged   = true", `pid_mode     = "host"`, `network_mode = "host"`} {
		if !strings.Contains(job, needed) {
			t.Errorf("there is no %s", needed)
		}
	}
	if _, err := backend.ParseConfig([]byte(between(t, job, "<<YAML\n", "YAML\n")), "", ""); err != nil {
		t.Errorf("backends.yaml: %v", err)
	}
}

func TestNomad_Volumes(t *testing.T) {
	created := nomadFile(t, "volume.hcl")
	p, err := volume.ParseParameters(settings(between(t, created, "parameters {", "}")), settings(created)["name"])
	if err != nil || p.OnDelete != volume.OnDeleteRequireEmpty {
		t.Errorf("volume.hcl: %+v, %v", p, err)
	}
	static := nomadFile(t, "static-volume.hcl")
	read, err := volume.Read(volume.Given{Handle: settings(static)["external_id"], Context: settings(between(t, static, "context {", "}"))})
	if err != nil || read.ID.Bucket == "" {
		t.Errorf("static-volume.hcl: %v, %v", read.ID, err)
	}
	plugin := settings(between(t, nomadFile(t, "plugin.nomad.hcl"), "csi_plugin {", "}"))["id"]
	for name, file := range map[string]string{"volume.hcl": created, "static-volume.hcl": static} {
		if got := settings(file)["plugin_id"]; got != plugin {
			t.Errorf("%s is for plugin %s, not %s", name, got, plugin)
		}
	}
	if got, want := settings(between(t, nomadFile(t, "example.nomad.hcl"), "volume \"data\" {", "}"))["source"], settings(created)["id"]; got != want {
		t.Errorf("the example uses volume %s, not %s", got, want)
	}
}
