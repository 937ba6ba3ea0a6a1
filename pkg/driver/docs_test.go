package driver

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/pflag"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/usage"
	"github.com/s3-csi/s3-csi-driver/pkg/podclient"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

var update = flag.Bool("update", false, "write docs/reference/flags.md and docs/reference/metrics.md instead of checking them")

// checkDocument holds a file of docs/ against what the code says.
func checkDocument(t *testing.T, name, want string) {
	t.Helper()
	path := "../../docs/" + name
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want {
		t.Errorf("docs/%s is not what the code says; write it with: go test ./pkg/driver -run %s -update", name, t.Name())
	}
}

func TestFlagsDocument(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# Flags

<!-- Written by: go test ./pkg/driver -run TestFlagsDocument -update -->

` + "`s3-csi-driver [all|controller|node|check|status|volumes] [--flag=value …]`" + `. The default mode is ` + "`all`" + `. A flag of another mode is an error.

Every flag except ` + "`--version`" + ` can also be set with an environment variable: ` +
		"`S3_CSI_`" + ` and its name in capitals with underscores, such as ` + "`" + FlagVariables("cluster-id")[0] + "`" + `. The command line takes precedence.

Exit codes: 0 after a clean shutdown, 2 for a mistake on the command line or in the environment, 130 or 143 after a second SIGINT or
SIGTERM, 1 for all other errors.

`)
	var o Options
	for _, group := range []struct {
		title string
		add   func(*pflag.FlagSet)
	}{
		{"Modes all, controller and node", o.Common.addFlags},
		{"Modes all and controller", o.Controller.addFlags},
		{"Modes all and node", o.Node.addFlags},
		{"Mode check", o.Check.addFlags},
		{"Mode status", o.Status.addFlags},
		{"Mode volumes", o.Volumes.addFlags},
	} {
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		fs.SortFlags = false
		group.add(fs)
		fmt.Fprintf(&b, "## %s\n\n| flag | default | meaning |\n|---|---|---|\n", group.title)
		fs.VisitAll(func(f *pflag.Flag) {
			more, def := "", "none"
			if variables := FlagVariables(f.Name); len(variables) > 1 {
				more = " Also `" + strings.Join(variables[1:], "`, `") + "`."
			}
			if f.DefValue != "" {
				def = "`" + f.DefValue + "`"
			}
			fmt.Fprintf(&b, "| `--%s` | %s | %s |\n", f.Name, def, strings.ToUpper(f.Usage[:1])+f.Usage[1:]+"."+more)
		})
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "Mode [check](../how-to/check.md) also takes, with the same meaning: %s. The default of `--v` is 0. The exit code is 1 if something that the "+
		"driver needs is missing.\n\n", strings.Join(sharedWith(ModeCheck, new(CheckOptions).addFlags), ", "))
	fmt.Fprintf(&b, "Mode [status](../how-to/status.md) also takes: %s.\n\n", strings.Join(sharedWith(ModeStatus, new(StatusOptions).addFlags), ", "))
	fmt.Fprintf(&b, "Mode [volumes](../how-to/status.md#the-volumes-of-a-cluster) also takes: %s. The exit code is 1 if a backend or a bucket could not be "+
		"read.\n\n",
		strings.Join(sharedWith(ModeVolumes, new(VolumesOptions).addFlags), ", "))
	fmt.Fprintf(&b, `## Variables without a flag

They configure the backend `+"`default`"+` if the config file does not declare it.

| variables | meaning |
|---|---|
| %s | Region. |
| %s | URL of the endpoint. If empty, AWS. |

The AWS SDK finds the driver's own credentials in its usual places (`+"`AWS_ACCESS_KEY_ID`"+` and so on). The controller uses them, and
volumes with `+"`credentials: driver`"+`.
`, "`"+strings.Join(regionVariables(), "`, `")+"`", "`"+strings.Join(endpointVariables(), "`, `")+"`")
	checkDocument(t, "reference/flags.md", b.String())
}

// sharedWith are the flags of other modes that a command has too.
func sharedWith(mode Mode, add func(*pflag.FlagSet)) []string {
	var names []string
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	add(own)
	new(Options).Flags(mode).VisitAll(func(f *pflag.Flag) {
		if own.Lookup(f.Name) == nil {
			names = append(names, "`--"+f.Name+"`")
		}
	})
	return names
}

func TestMetricsDocument(t *testing.T) {
	m := NewMetrics("s3.csi.driver", "v0")
	config, err := backend.NewLive("", "", "")
	if err != nil {
		t.Fatal(err)
	}
	if err := config.Register(m.Registerer()); err != nil {
		t.Fatal(err)
	}
	m.ShowLauncher(func() LauncherInfo {
		return LauncherInfo{LauncherSystemd, "252", "landlock", 7, []string{"IPAddressDeny"}}
	})
	m.Registerer().MustRegister(slices.Concat(tracker.SampleCollectors(), usage.SampleCollectors(), podclient.SampleCollectors(), status.SampleCollectors())...)
	m.csi.RecordMetrics(csi.Identity_Probe_FullMethodName, nil, time.Millisecond)
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString(`# Metrics

<!-- Written by: go test ./pkg/driver -run TestMetricsDocument -update -->

The driver serves metrics in the Prometheus format at ` + "`/metrics`" + ` of ` + "`--http-endpoint`" + `. ` + "`/healthz`" + ` fails once the driver shuts
down. ` + "`/readyz`" + ` fails while the driver does not serve requests, or must not publish volumes. Neither checks S3. ` + "`/readyz`" + ` also lists
degraded features, one ` + "`note:`" + ` per line. [Status](../how-to/status.md#the-mounts-of-a-node) explains the states of mounts,
[warm volumes](../explanation/sessions.md#warm-volumes) why lingering mounts end.

| metric | type | labels | meaning |
|---|---|---|---|
`)
	runtime := 0
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "go_") || strings.HasPrefix(f.GetName(), "process_") {
			runtime++
			continue
		}
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, "`"+l.GetName()+"`")
		}
		slices.Sort(labels)
		help := strings.TrimPrefix(f.GetHelp(), "[ALPHA] ")
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s. |\n", f.GetName(), strings.ToLower(f.GetType().String()), strings.Join(labels, ", "), strings.TrimSuffix(help, "."))
	}
	if runtime == 0 {
		t.Error("the metrics of the Go runtime and of the process are missing")
	}
	b.WriteString("| `go_*`, `process_*` | | | Metrics of the Go runtime and of the process. |\n")
	checkDocument(t, "reference/metrics.md", b.String())
}

// pages are all pages by their paths.
func pages(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("../../docs/*/*.md")
	if err != nil || len(paths) < 10 {
		t.Fatalf("%d pages: %v", len(paths), err)
	}
	texts := map[string]string{}
	for _, path := range append(paths, "../../README.md") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		texts[path] = string(text)
	}
	return texts
}

// The page on the architecture names each directory of pkg that holds a package, and no other.
func TestDocs_ArchitectureNamesEveryPackage(t *testing.T) {
	page := pages(t)["../../docs/explanation/architecture.md"]
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("`(pkg/[a-z0-9/]+)`").FindAllStringSubmatch(page, -1) {
		named[m[1]] = true
	}
	there := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".go") {
			there["pkg/"+strings.TrimPrefix(filepath.Dir(path), "../")] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for dir := range there {
		if parent := filepath.Dir(dir); !named[dir] && !named[parent] { // the one of its parent covers what is for tests
			t.Errorf("docs/explanation/architecture.md does not name %s", dir)
		}
	}
	for _, m := range regexp.MustCompile(`\bpkg/[a-z0-9/_]+(\.go)?`).FindAllString(page, -1) {
		if strings.HasSuffix(m, ".go") {
			m = filepath.Dir(m)
		}
		if !there[m] {
			t.Errorf("docs/explanation/architecture.md tells of %s, which is no package", m)
		}
	}
}

// A metric that any page names is one that there is: alerts on others would never fire.
func TestDocs_MetricsExist(t *testing.T) {
	all := pages(t)
	const rules = "../../charts/s3-csi-driver/alerts.yaml"
	text, err := os.ReadFile(rules)
	if err != nil {
		t.Fatal(err)
	}
	all[rules] = string(text)
	known := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| ([a-z]+) \\|").FindAllStringSubmatch(all["../../docs/reference/metrics.md"], -1) {
		known[m[1]] = true
		if m[2] == "histogram" {
			for _, part := range []string{"_bucket", "_count", "_sum"} {
				known[m[1]+part] = true
			}
		}
	}
	alerts := 0
	for path, text := range all {
		for _, name := range regexp.MustCompile(`\b(s3csi|csi_plugin)_[a-z0-9_]+`).FindAllString(text, -1) {
			alerts++
			if !known[name] {
				t.Errorf("%s names the metric %s, which docs/reference/metrics.md does not have", path, name)
			}
		}
	}
	if alerts < 20 {
		t.Errorf("only %d metrics are named", alerts)
	}
}

// A line of the log that the page on monitoring explains is one that the driver writes.
func TestDocs_LogMessagesExist(t *testing.T) {
	_, rest, found := strings.Cut(pages(t)["../../docs/how-to/monitoring.md"], "| line of the driver's log | it means |\n")
	table, _, _ := strings.Cut(rest, "\n\n")
	if !found {
		t.Fatal("docs/how-to/monitoring.md has no table of lines of the log")
	}
	var code strings.Builder
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		code.Write(source)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	lines := 0
	for row := range strings.Lines(table) {
		cell, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " | ")
		for _, m := range regexp.MustCompile("`([A-Z][^`]+)`").FindAllStringSubmatch(cell, -1) {
			lines++
			if !strings.Contains(code.String(), `"`+m[1]) {
				t.Errorf("docs/how-to/monitoring.md explains the line %q, which nothing writes", m[1])
			}
		}
	}
	if lines < 10 {
		t.Errorf("only %d lines are explained", lines)
	}
}
