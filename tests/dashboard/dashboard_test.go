package dashboard

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/promql/promqltest"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

func TestMain(m *testing.M) { os.Exit(rigtest.Main(m)) }

// interval is the time between two scrapes.
const interval = time.Minute

// panel is a panel of a dashboard, as far as it matters here.
type panel struct {
	Type, Title, Description string
	Targets                  []struct{ Expr string }
}

func panels(t *testing.T) []panel {
	t.Helper()
	text, err := os.ReadFile("../../charts/s3-csi-driver/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct{ Panels []panel }
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	if len(d.Panels) < 20 {
		t.Fatalf("%d panels", len(d.Panels))
	}
	return slices.DeleteFunc(d.Panels, func(p panel) bool { return p.Type == "row" })
}

// scrapes are the values of each series at consecutive scrapes, "_" where it was not there.
type scrapes struct {
	values map[string][]string
	n      int
}

func (s *scrapes) scrape(t *testing.T, d *rig.Driver) {
	t.Helper()
	for line := range strings.Lines(rigtest.Get(t, d, "/metrics")) {
		at := strings.LastIndexByte(line, ' ')
		if at < 0 || strings.HasPrefix(line, "#") {
			continue
		}
		// Prometheus adds the target.
		series := line[:at] + `{instance="node"}`
		if head, labels, ok := strings.Cut(line[:at], "{"); ok {
			series = head + `{instance="node",` + labels
		}
		s.values[series] = append(s.at(series), strings.TrimSpace(line[at:]))
	}
	s.n++
}

// at returns the values of a series, one for each scrape so far.
func (s *scrapes) at(series string) []string {
	all := s.values[series]
	return append(all, slices.Repeat([]string{"_"}, s.n-len(all))...)
}

// load is what promqltest loads.
func (s *scrapes) load() string {
	var b strings.Builder
	fmt.Fprintf(&b, "load %s\n", interval)
	for _, series := range slices.Sorted(maps.Keys(s.values)) {
		fmt.Fprintf(&b, "  %s %s\n", series, strings.Join(s.at(series), " "))
	}
	return b.String()
}

func TestEveryPanelHasData(t *testing.T) {
	rigtest.NeedClient(t, "mountpoint-s3")
	n := rigtest.New(t)
	d := n.Drive(t, "all", "--volume-metrics")
	seen := scrapes{values: map[string][]string{}}
	seen.scrape(t, d)

	v := rigtest.Create(t, d, "shown", "client", "mountpoint-s3", "usage", "6h")
	target := n.Rig.Target("t")
	rigtest.Publish(t, d, v, target)
	file := filepath.Join(target, "file")
	if err := os.WriteFile(file, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	rigtest.Delete(t, d, rigtest.Create(t, d, "deleted").GetVolumeId())
	refused := rigtest.PublishRequest(v, n.Rig.Target("refused"))
	refused.VolumeContext = maps.Clone(refused.GetVolumeContext())
	refused.VolumeContext["client"] = "no-such-client"
	if _, err := d.NodePublishVolume(rigtest.Context(t, time.Minute), refused); err == nil {
		t.Error("a volume with a client that does not exist was published")
	}
	shows := func(what string) func() bool {
		return func() bool { return strings.Contains(rigtest.Get(t, d, "/metrics"), "\n"+what) }
	}
	// The client reports its requests every few seconds, and another client counts from zero.
	rigtest.Await(t, time.Minute, "requests of the client", shows("s3csi_volume_written_bytes_total{"))
	rigtest.Await(t, time.Minute, "the usage of the volume", shows("s3csi_volume_objects{"))
	seen.scrape(t, d)
	rigtest.Kill(t, n.Rig.Running(rig.Programs()["mountpoint-s3"])...)
	rigtest.Await(t, time.Minute, "a heal", shows(`s3csi_mount_heals_total{place="host",result="replaced"}`))
	rigtest.Await(t, time.Minute, "requests of the next client", func() bool {
		_, err := os.ReadFile(file)
		return err == nil && shows("s3csi_volume_read_bytes_total{")()
	})
	again := n.Rig.Target("again")
	rigtest.Publish(t, d, v, again)
	rigtest.Unpublish(t, d, v, again)
	seen.scrape(t, d)
	seen.scrape(t, d)
	rigtest.Unpublish(t, d, v, target)

	storage := promqltest.LoadedStorage(t, seen.load())
	t.Cleanup(func() { _ = storage.Close() })
	engine := promqltest.NewTestEngine(t, false, 0, 1e6)
	at := time.Unix(0, 0).Add(time.Duration(seen.n-1) * interval)
	for _, p := range panels(t) {
		t.Run(p.Title, func(t *testing.T) {
			if p.Description == "" || len(p.Targets) == 0 {
				t.Errorf("%+v", p)
			}
			for _, target := range p.Targets {
				expr := strings.NewReplacer("$__rate_interval", "5m", "$volume", ".*").Replace(target.Expr)
				q, err := engine.NewInstantQuery(t.Context(), storage, nil, expr, at)
				if err != nil {
					t.Fatal(err)
				}
				vector, err := q.Exec(t.Context()).Vector()
				if err != nil {
					t.Fatal(err)
				}
				known := 0
				for _, sample := range vector {
					if !math.IsNaN(sample.F) {
						known++
					}
				}
				if known == 0 {
					t.Errorf("%s has no data", expr)
				}
				q.Close()
			}
		})
	}
}
