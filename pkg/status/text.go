package status

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/table"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Parse reads a document. One of another version is an error.
func Parse(b []byte) (d Document, err error) {
	if err := json.Unmarshal(b, &d); err != nil {
		return d, fmt.Errorf("the driver's answer is no status: %w", err)
	}
	if d.Version != Version {
		return d, fault.Errorf(fault.Unsupported, "the driver answered in version %q of the status, but this program reads %s: use -o json, or the driver's own "+
			"program", d.Version, Version)
	}
	return d, nil
}

// Of returns the document with the mounts and the client of one pod only: "namespace/name", or "name" if the CO gives no namespaces.
func (d Document) Of(pod string) Document {
	mounts := []Mount{} // not nil, which would be null
	for _, m := range d.Mounts {
		if slices.ContainsFunc(m.Publications, func(p Publication) bool { return p.Pod.String() == pod }) {
			mounts = append(mounts, m)
		}
	}
	d.Mounts = mounts
	d.PodClients = slices.DeleteFunc(slices.Clone(d.PodClients), func(p PodClient) bool { return p.Pod.String() != pod })
	return d
}

// String returns the pod's namespace and name; "": they are unknown.
func (p Pod) String() string {
	if p.Namespace == "" || p.Name == "" {
		return p.Name
	}
	return p.Namespace + "/" + p.Name
}

// Names writes the names of the mounts, one a line.
func (d Document) Names(w io.Writer) error {
	var b strings.Builder
	for _, m := range d.Mounts {
		b.WriteString(m.Name + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Text writes the document for people: a line for each mount, and below it what is not well. With output, the end of the clients' output
// follows.
func (d Document) Text(w io.Writer, output bool) error {
	t := table.New("MOUNT", "STATE", "CLIENT", "VERSION", "VOLUME", "PV", "PODS", "SESSION", "MEMORY", "UPLOADS")
	for _, m := range d.Mounts {
		t.Row(m.Name, d.state(m.State, m.Since), m.Client.Name, m.Client.Version, m.VolumeID, first(m.volumes()), m.pods(), d.session(m), memory(m.Memory),
			uploads(m.Uploads))
		for _, p := range m.Problems {
			t.Note(d.problem(p))
		}
		if output {
			for _, line := range m.Client.Output {
				t.Note("| " + line)
			}
		}
		if !m.LingersUntil.IsZero() {
			t.Note("no pod uses it; it stays for " + table.Span(m.LingersUntil.Sub(d.Time)))
		}
		if m.Superseded {
			t.Note("another mount has replaced it; it ends when the files that were open in it are closed")
		}
	}
	pods := table.New("POD", "VOLUME", "SOCKET", "STATE", "HANDOVERS")
	for _, p := range d.PodClients {
		pods.Row(p.Pod.label(""), p.Volume, p.EmptyDir+"/"+p.Socket, d.state(p.State, p.Since), strconv.Itoa(p.Handovers))
		if p.LastFailure != nil {
			pods.Note(d.failure(*p.LastFailure))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "driver %s %s on node %s, launcher %s, mounts: %d\n", d.Driver.Name, d.Driver.Version, d.Driver.NodeID, d.Launcher, len(d.Mounts))
	for _, n := range d.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	if len(d.Mounts) > 0 {
		b.WriteString("\n" + t.String())
	}
	if len(d.PodClients) > 0 {
		b.WriteString("\nclients in pods:\n\n" + pods.String())
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (d Document) state(s State, since time.Time) string {
	if s == Healthy || since.IsZero() {
		return string(s)
	}
	return string(s) + " " + table.Span(d.Time.Sub(since))
}

func (d Document) failure(p Problem) string {
	return "last failure: " + p.Reason + ": " + p.Message + "; " + table.Span(d.Time.Sub(p.Since)) + " ago" + d.nextTry(p)
}

// label names the pod as well as it is known, or says other.
func (p Pod) label(other string) string {
	switch {
	case p.Name != "":
		return p.String()
	case p.UID != "":
		return "uid " + p.UID
	}
	return other
}

func (d Document) problem(p Problem) string {
	text := p.Reason + ": " + p.Message
	if !p.Since.IsZero() {
		text += "; since " + table.Span(d.Time.Sub(p.Since))
	}
	return text + d.nextTry(p)
}

func (d Document) nextTry(p Problem) string {
	if !p.NextTry.After(d.Time) {
		return ""
	}
	return "; next try in " + table.Span(p.NextTry.Sub(d.Time))
}

func (d Document) session(m Mount) string {
	text := m.Session.State
	if m.Session.RemainingSeconds > 0 {
		text += ", " + table.Span(time.Duration(m.Session.RemainingSeconds)*time.Second) + " left"
	}
	return text
}

// volumes are the PersistentVolumes of a mount.
func (m Mount) volumes() (names []string) {
	for _, p := range m.Publications {
		if p.PersistentVolume != "" && !slices.Contains(names, p.PersistentVolume) {
			names = append(names, p.PersistentVolume)
		}
	}
	return names
}

func (m Mount) pods() string {
	var names []string
	for _, p := range m.Publications {
		names = append(names, p.Pod.label(p.Target))
	}
	return first(names)
}

// first returns the first of the names, and how many others there are.
func first(names []string) string {
	if len(names) > 1 {
		return fmt.Sprintf("%s (+%d)", names[0], len(names)-1)
	}
	return strings.Join(names, "")
}

func memory(m *Memory) string {
	switch {
	case m == nil:
		return ""
	case m.LimitBytes == 0:
		return table.Bytes(m.UsedBytes)
	}
	return table.Bytes(m.UsedBytes) + "/" + volume.FormatQuantity(m.LimitBytes)
}

func uploads(u *Uploads) string {
	switch {
	case u == nil:
		return ""
	case u.Files == 0:
		return "0"
	}
	return fmt.Sprintf("%d, %s", u.Files, table.Bytes(uint64(max(u.Bytes, 0))))
}
