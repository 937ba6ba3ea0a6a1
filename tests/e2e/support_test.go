package e2e

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
)

const (
	// suiteBucket is where the volumes of the upstream suite are.
	suiteBucket = "external-storage"
	// inlineBucket and inlineRole are those of the volumes that the suite's pods define themselves, as testdata has them.
	inlineBucket = "external-storage-inline"
	inlineRole   = "external-storage"
	// suiteTimeout is how long one run of the suite's program may take, which most tests need a quarter of a minute for. Those that
	// restart containers allow themselves more than a quarter of an hour.
	suiteTimeout = 25 * time.Minute
	// suiteRuns is how many are run at a time: they wait more than they work.
	suiteRuns = 12
	suiteName = "External Storage [Driver: " + csiName + "] "
)

// spec is what Ginkgo reports of one test.
type spec struct {
	ContainerHierarchyTexts    []string
	LeafNodeText               string
	State                      string
	RunTime                    time.Duration
	CapturedGinkgoWriterOutput string
	Failure                    struct{ Message string }
}

// name is the test's, without what all begin with, as Ginkgo joins it: without containers that have no name.
func (s spec) name() string {
	texts := slices.DeleteFunc(append(slices.Clone(s.ContainerHierarchyTexts), s.LeafNodeText), func(text string) bool { return text == "" })
	return strings.TrimPrefix(strings.Join(texts, " "), suiteName)
}

// clients are the driver's.
func clients() []string { return []string{"mountpoint-s3", "rclone"} }

// inlinePod is a pod that defines its volume, "data", itself.
type inlinePod struct {
	name       string
	attributes map[string]string
	source     string // further fields of the volume's source, as YAML in flow style: "readOnly: true"
	pod        string // further fields of the pod's spec
	command    string // of the shell, before it sleeps
}

func (p inlinePod) yaml() string {
	attributes, _ := json.Marshal(p.attributes)
	script, _ := json.Marshal(strings.TrimPrefix(p.command+" && "+forever, " && "))
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec: {%s}`, p.name, join("terminationGracePeriodSeconds: 1", p.pod,
		fmt.Sprintf("containers: [{name: c, image: %q, command: [sh, -c, %s], volumeMounts: [{name: data, mountPath: /v}]}]", cluster.Busybox, script),
		fmt.Sprintf("volumes: [{name: data, csi: {%s}}]", join("driver: "+csiName, p.source, "volumeAttributes: "+string(attributes)))))
}

// kind stands in for the program of that name: the tests' cluster is there already, and kind's image of a node cannot be had where they
// run. It loads an image as kind does, with the containerd of the node.
const kind = `#!/bin/sh
case "$1 $2" in
"create cluster" | "delete cluster") ;;
"load image-archive") exec %q --address %q --namespace k8s.io images import --all-platforms --digests --snapshotter overlayfs - <"$3" ;;
*)
	echo "the tests have no kind $*" >&2
	exit 1
	;;
esac
`

// expected is the output that a page shows. "…" stands for anything.
func expected(text string) *regexp.Regexp {
	var parts []string
	for part := range strings.SplitSeq(strings.TrimSpace(text), "…") {
		parts = append(parts, regexp.MustCompile(` +`).ReplaceAllString(regexp.QuoteMeta(part), " +"))
	}
	return regexp.MustCompile(`(?s)^\s*` + strings.Join(parts, ".*") + `\s*$`)
}

// change is what the API server said of an object, and when.
type change struct {
	at     time.Time
	kind   string // ADDED, MODIFIED, DELETED
	object object
}

// watch notes all changes of a kind of objects from now on, until the test ends.
type watch struct {
	mu      sync.Mutex
	changes []change
	more    chan struct{} // closed when there are more
}

// first is when the first change after a moment was seen for which is holds.
func (w *watch) first(t testing.TB, what string, after time.Time, is func(change) bool) time.Time {
	t.Helper()
	timeout := time.After(patience)
	for {
		w.mu.Lock()
		changes, more := w.changes, w.more
		w.mu.Unlock()
		for _, c := range changes {
			if c.at.After(after) && is(c) {
				return c.at
			}
		}
		select {
		case <-more:
		case <-timeout:
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}

// ready is when a pod became ready, after a moment.
func (w *watch) ready(t testing.TB, name string, after time.Time) time.Time {
	t.Helper()
	return w.first(t, "pod "+name, after, func(c change) bool { return c.object.Metadata.Name == name && c.object.ready() })
}

// create creates an object and says when that was asked for.
func create(t testing.TB, path, object string) time.Time {
	t.Helper()
	began := time.Now()
	if err := world.Create(t.Context(), path, object); err != nil {
		t.Fatal(err)
	}
	return began
}

// numbers are what was measured, in the order of the table.
type numbers struct {
	names  []string
	values map[string][]time.Duration
}

func (n *numbers) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-62s%9s%9s%9s%5s\n", "", "median", "least", "most", "of")
	for _, name := range n.names {
		all := slices.Sorted(slices.Values(n.values[name]))
		fmt.Fprintf(&b, "%-62s%7.2f s%7.2f s%7.2f s%5d\n", name, all[len(all)/2].Seconds(), all[0].Seconds(), all[len(all)-1].Seconds(), len(all))
	}
	return b.String()
}

// service is a Deployment of one pod with a volume.
type service struct {
	ns, name       string
	volume         object
	bucket, prefix string
}

// run runs a shell's command in the pod.
func (s *service) run(t testing.TB, script string) string {
	t.Helper()
	return execute(t, s.ns, "deployment/"+s.name, "sh", "-c", script)
}

// volumeGone waits until a PersistentVolume is.
func volumeGone(t testing.TB, name string) {
	t.Helper()
	eventually(t, "the volume to be gone", func() error {
		o, there := find(t, "pv", "", name)
		if !there {
			return nil
		}
		return fmt.Errorf("it is %s; %s", o.Status.Phase, lastEvent(t, "default", name))
	})
}

// erased waits until a volume that is a prefix is gone, and sees that S3 has nothing of it but a tombstone.
func erased(t testing.TB, v object) {
	t.Helper()
	volumeGone(t, v.Metadata.Name)
	if b, prefix := place(t, v); len(keys(t, b, prefix)) > 0 {
		t.Errorf("left in S3: %q", keys(t, b, prefix))
	}
	if state := recordState(t, v); state != "deleted" {
		t.Errorf("the volume's record is of a volume that is %q: it has to be a tombstone", state)
	}
}

// volumeRecord is what the record of a volume that is a prefix says.
type volumeRecord struct {
	State         string `json:"state"`
	VolumeID      string `json:"volumeID"`
	OnDelete      string `json:"onDelete"`
	CapacityBytes int64  `json:"capacityBytes"`
}

// recordOf is the record of a volume that is a prefix.
func recordOf(t testing.TB, v object) volumeRecord {
	t.Helper()
	b, _ := place(t, v)
	var r volumeRecord
	text := content(t, b, ".s3-csi/volumes/"+v.Metadata.Name)
	if err := json.Unmarshal([]byte(text), &r); err != nil || r.VolumeID != v.Spec.CSI.VolumeHandle {
		t.Errorf("the record of %s is %s (%v)", v.Spec.CSI.VolumeHandle, text, err)
	}
	return r
}

// recordState is the state of a volume in its record.
func recordState(t testing.TB, v object) string {
	t.Helper()
	return recordOf(t, v).State
}
