package driver

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/pflag"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

var update = flag.Bool("update", false, "write docs/flags.md and docs/metrics.md instead of checking them")

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

` + "`s3-csi-driver [all|controller|node|check] [--flag=value …]`" + `. Without a mode it is ` + "`all`" + `. A flag of another mode is an error.

Every flag can be set by an environment variable; the first of the list that is set and not empty counts, and the command
line wins over all of them. Exit codes: 0 after an orderly end, 2 for a mistake on the command line or in the environment,
130 or 143 after a second SIGINT or SIGTERM, 1 for everything else.

`)
	var o Options
	for _, group := range []struct {
		title string
		add   func(*pflag.FlagSet)
	}{
		{"Modes all, controller and node", o.Common.AddFlags},
		{"Modes all and controller", o.Controller.AddFlags},
		{"Modes all and node", o.Node.AddFlags},
		{"Mode check", o.Check.AddFlags},
	} {
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		fs.SortFlags = false
		group.add(fs)
		fmt.Fprintf(&b, "## %s\n\n| flag | variables | default | meaning |\n|---|---|---|---|\n", group.title)
		fs.VisitAll(func(f *pflag.Flag) {
			variables, def := "–", "none"
			if f.Name != "version" {
				variables = "`" + strings.Join(FlagVariables(f.Name), "`, `") + "`"
			}
			if f.DefValue != "" {
				def = "`" + f.DefValue + "`"
			}
			fmt.Fprintf(&b, "| `--%s` | %s | %s | %s |\n", f.Name, variables, def, strings.ToUpper(f.Usage[:1])+f.Usage[1:]+".")
		})
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "Mode [check](check.md) also takes, with the same meaning: %s. Its `--v` is 0 unless given, and its exit code is 1 where something that the driver needs is missing.\n\n", strings.Join(sharedWithCheck(), ", "))
	fmt.Fprintf(&b, `## Variables without a flag

They describe the backend `+"`default`"+` where the config file does not.

| variables | meaning |
|---|---|
| %s | Its region. |
| %s | Its endpoint, a URL; none: AWS. |

The controller's own credentials, and those of volumes with `+"`credentials: driver`"+`, come from where the AWS SDK finds them
(`+"`AWS_ACCESS_KEY_ID`"+` and so on).
`, "`"+strings.Join(regionVariables(), "`, `")+"`", "`"+strings.Join(endpointVariables(), "`, `")+"`")
	checkDocument(t, "flags.md", b.String())
}

// sharedWithCheck are the flags of other modes that mode check has too.
func sharedWithCheck() []string {
	var names []string
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(CheckOptions).AddFlags(own)
	new(Options).Flags(ModeCheck).VisitAll(func(f *pflag.Flag) {
		if own.Lookup(f.Name) == nil {
			names = append(names, "`--"+f.Name+"`")
		}
	})
	return names
}

func TestMetricsDocument(t *testing.T) {
	m, err := NewMetrics("s3.csi.driver", "v0")
	if err != nil {
		t.Fatal(err)
	}
	config, err := backend.NewLive("", "", "")
	if err != nil {
		t.Fatal(err)
	}
	if err := config.Register(m.Registerer()); err != nil {
		t.Fatal(err)
	}
	if err := m.ShowLauncher(func() LauncherInfo { return LauncherInfo{LauncherSystemd, "252", []string{"IPAddressDeny"}} }); err != nil {
		t.Fatal(err)
	}
	for _, c := range mount.SampleMetrics() {
		if err := m.Registerer().Register(c); err != nil {
			t.Fatal(err)
		}
	}
	m.csi.RecordMetrics(csi.Identity_Probe_FullMethodName, nil, time.Millisecond)
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString(`# Metrics

<!-- Written by: go test ./pkg/driver -run TestMetricsDocument -update -->

Served in Prometheus' format on ` + "`/metrics`" + ` of ` + "`--http-endpoint`" + `. Beside it are ` + "`/healthz`" + `, which fails once the driver is
stopping, and ` + "`/readyz`" + `, which is what the CSI Probe says: requests are answered. Neither looks at S3. ` + "`/readyz`" + ` also lists what
works less well than it could, a ` + "`note:`" + ` a line.

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
	b.WriteString("| `go_*`, `process_*` | | | Those of the Go runtime and of the process. |\n")
	checkDocument(t, "metrics.md", b.String())
}
