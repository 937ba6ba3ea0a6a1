//go:build !lane || shared

package e2e

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the tables of docs/reference/conformance.md, and with a cluster the lists of tests of the upstream suite "+
	"that pass, instead of checking them")

// suiteClients are the clients that the upstream suite is run with.
var suiteClients = []string{"mountpoint-s3", "rclone"}

// definitionOf is the file that tells the suite of the driver.
func definitionOf(client string) string { return "testdata/external-storage/" + client + ".yaml" }

// suiteSkips are the tests of the upstream suite that would run by the capabilities and are not run.
var suiteSkips = []struct {
	pattern string // of the tests' names, a regular expression
	client  string // whose tests; "": all clients'
	what    string // for the reader
	why     string
}{
	{pattern: `\[Disruptive\]`, what: "`[Disruptive]`: pods and volumes while kubelet is down",
		why: "They log in to nodes over SSH. Restarts of kubelet and of nodes have tests of their own in `tests/e2e`."},
	{pattern: `\[Feature:(Windows|SELinux|VolumeSourceXFS|volumegroupsnapshot|snapshotmetadata)`,
		what: "`[Feature:…]`: Windows, SELinux, XFS, groups of snapshots, metadata of snapshots",
		why: "The driver is for Linux, and makes no file systems. It has SELinux labels, for which a host that enforces them is needed. The suite runs none of " +
			"these by default."},
	{pattern: `subPath should fail if .* is outside the volume`, what: "subPath should fail if … is outside the volume (four tests)",
		why: "They make a symbolic link in the volume, which no client can. There is nothing that could lead out of a volume; `..` in a subPath is refused by " +
			"Kubernetes."},
	{pattern: `provisioning should provision storage with any volume data source`, what: "provisioning should provision storage with any volume data source",
		why: "It installs two programs of other projects, a populator and a validator, whose images the test's cluster cannot have. What they do is to fill a " +
			"claim of theirs, and nothing of that is the driver's."},
	{pattern: `volumeIO should write files of various sizes`, client: "mountpoint-s3",
		what: "volumeIO should write files of various sizes, verify size, validate content",
		why:  "It appends to files. [Mountpoint](clients.md#what-each-client-is-good-for) writes a file once, from start to end."},
	{pattern: `snapshottable|data source|volume-expand|volume-modify|expansion of pvcs|\(block volmode\)`, client: "mountpoint-s3",
		what: "snapshots, clones, expansion and modification",
		why:  "They are the controller's work, which is the same with each client. They run with `rclone`."},
	{pattern: `\(retain policy\)\] snapshottable-stress`, what: "snapshottable-stress (retain policy)",
		why: "It changes the policy of each VolumeSnapshotContent to Delete and deletes the VolumeSnapshot at once. A snapshot-controller whose cache still has " +
			"the former policy then never deletes the content. `snapshottable` runs with both policies, `snapshottable-stress` with Delete."},
	{pattern: `\(late-binding\)`, client: "mountpoint-s3", what: "Generic Ephemeral-volume (late-binding)",
		why: "They differ from those of immediate binding in the work of the scheduler. They run with `rclone`."},
}

// suiteSkipped are the patterns of a client.
func suiteSkipped(client string) []string {
	var patterns []string
	for _, s := range suiteSkips {
		if s.client == "" || s.client == client {
			patterns = append(patterns, s.pattern)
		}
	}
	return patterns
}

// capabilities are what a driver can claim in the suite, and why this one does or does not.
var capabilities = map[string]string{
	"FSResizeFromSourceNotSupported": "A mount shows no size of its volume, so that of a restored volume cannot be larger than that of its source.",
	"RWX":                            "Any number of pods on any number of nodes.",
	"block":                          "S3 holds files.",
	"capReadOnlyMany":                "Such a volume is read-only for everybody.",
	"capacity":                       "There is no capacity to run out of.",
	"controllerExpansion":            "The driver records the new size.",
	"exec": "Programs can be started from volumes with `fileMode: \"0777\"`. The test makes its own one executable by `chmod`, which " +
		"Mountpoint refuses.",
	"fsGroup":            "Files show the pod's group.",
	"groupSnapshot":      "There are no snapshots of groups.",
	"multiplePVsSameID":  "A volume can have several PersistentVolumes.",
	"multipods":          "Pods of a node share volumes.",
	"nodeExpansion":      "A node has nothing to expand.",
	"offlineExpansion":   "The driver records the new size, and nothing changes for pods.",
	"onlineExpansion":    "The driver records the new size, and nothing changes for pods.",
	"persistence":        "Data outlives pods.",
	"pvcDataSource":      "The driver clones volumes by copies on the server.",
	"readWriteOncePod":   "Kubernetes and the driver keep a second pod away.",
	"seLinuxMount":       "It is off in the chart by default, and the test machine's kernel has no SELinux.",
	"singleNodeVolume":   "A volume can be used on every node. The test's cluster has one, so that tests which need a second one do not run.",
	"snapshotDataSource": "The driver makes snapshots, and volumes from them, by copies on the server.",
	"snapshotMetadata":   "Snapshots have no metadata of changed blocks.",
	"topology":           "A volume is everywhere.",
	"volumeLimits":       "There is no limit, unless `--volume-attach-limit` says so.",
	"volumeMountGroup":   "The client shows the group; nothing changes owners afterwards, which tests of `fsGroupChangePolicy` expect.",
}

// claimed are the capabilities that a client's definition claims.
func claimed(t *testing.T, client string) map[string]bool {
	t.Helper()
	b, err := os.ReadFile(definitionOf(client))
	if err != nil {
		t.Fatal(err)
	}
	var definition struct {
		DriverInfo struct{ Capabilities map[string]bool }
	}
	if err := yaml.Unmarshal(b, &definition); err != nil {
		t.Fatal(err)
	}
	return definition.DriverInfo.Capabilities
}

func passingFile(client string) string { return "testdata/external-storage/passing-" + client + ".txt" }

// suitePassing are the tests that pass with a client, by their names.
func suitePassing(t *testing.T, client string) []string {
	t.Helper()
	b, err := os.ReadFile(passingFile(client))
	if err != nil && (!*update || !os.IsNotExist(err)) {
		t.Fatal(err)
	}
	return strings.FieldsFunc(string(b), func(r rune) bool { return r == '\n' })
}

func writeSuitePassing(t *testing.T, client string, names []string) {
	t.Helper()
	slices.Sort(names)
	if err := os.WriteFile(passingFile(client), []byte(strings.Join(names, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// conformance is what the tables of docs/reference/conformance.md have to be, by their names.
func conformance(t *testing.T) map[string]string {
	t.Helper()
	tables := map[string]string{}
	var b strings.Builder
	b.WriteString("| tests | client | why |\n|---|---|---|\n")
	for _, s := range suiteSkips {
		client := "both"
		if s.client != "" {
			client = "`" + s.client + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", s.what, client, s.why)
	}
	tables["skipped"] = b.String()

	b.Reset()
	fmt.Fprintf(&b, "| capability | `%s` | why |\n|%s\n", strings.Join(suiteClients, "` | `"), strings.Repeat("---|", len(suiteClients)+2))
	names := make([]string, 0, len(capabilities))
	for name := range capabilities {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int { return strings.Compare(strings.ToLower(a), strings.ToLower(b)) })
	for _, name := range names {
		limits := strings.HasSuffix(name, "NotSupported")
		if !slices.ContainsFunc(suiteClients, func(client string) bool { return claimed(t, client)[name] == limits }) {
			continue
		}
		fmt.Fprintf(&b, "| `%s` |", name)
		for _, client := range suiteClients {
			fmt.Fprintf(&b, " %s |", map[bool]string{true: "yes", false: "no"}[claimed(t, client)[name]])
		}
		fmt.Fprintf(&b, " %s |\n", capabilities[name])
	}
	tables["capabilities"] = b.String()
	return tables
}

// The tables of the page are those of the code and of the files that the suite is run with.
func TestConformanceDocs(t *testing.T) {
	const page = root + "/docs/reference/conformance.md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	now := string(text)
	for name, table := range conformance(t) {
		part := regexp.MustCompile(`(?s)(<!-- ` + name + `: [^\n]*-->\n\n)(.*?)(\n<!-- end of ` + name + ` -->)`)
		m := part.FindStringSubmatch(now)
		if m == nil {
			t.Fatalf("%s has no table %q", page, name)
		}
		if m[2] != table && !*update {
			t.Errorf("the table %q of %s is not the code's; go test ./e2e -run Docs -update writes it", name, page)
		}
		now = strings.Replace(now, m[0], m[1]+table+m[3], 1)
	}
	if *update {
		if err := os.WriteFile(page, []byte(now), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Every capability is decided and explained; no test is both listed and skipped; and what one client does not pass and another does
// is explained.
func TestTheSuiteIsExplained(t *testing.T) {
	for _, client := range suiteClients {
		have := claimed(t, client)
		for name := range have {
			if capabilities[name] == "" {
				t.Errorf("%s: nothing is said of %s", client, name)
			}
		}
		for name := range capabilities {
			if _, ok := have[name]; !ok {
				t.Errorf("%s: %s is not decided", client, name)
			}
		}
		skipped := regexp.MustCompile(strings.Join(suiteSkipped(client), "|"))
		listed := suitePassing(t, client)
		for _, test := range listed {
			if skipped.MatchString(test) {
				t.Errorf("%s: it is skipped and passes: %s", client, test)
			}
		}
		for _, other := range suiteClients {
			for _, test := range suitePassing(t, other) {
				explained := skipped.MatchString(test) || !have["exec"] && strings.HasSuffix(test, "should allow exec of files on the volume")
				if !slices.Contains(listed, test) && !explained {
					t.Errorf("%s: it does not run and nothing says why: %s", client, test)
				}
			}
		}
	}
}
