//go:build !lane || disrupt

package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// givenBlocks is the size of the file that workloads read, in blocks of 4096 bytes.
const givenBlocks = 1024

// work is what the container of a workload does, until there is /tmp/stop. Whatever goes wrong is in /tmp/errors, and how far each
// of the loops is in /tmp/count-*.
const work = `
cd /tmp && touch errors
failed() { echo "$(date +%%T) $*" >>errors; }
count() { echo $2 >.$1 && mv .$1 count-$1; }
files() { # are written, closed and read again
	i=0; while [ ! -e stop ]; do i=$((i+1))
		echo "file $i" 2>>errors >/v/file-$i || failed "writing file-$i"
		got=$(cat /v/file-$i 2>>errors); [ "$got" = "file $i" ] || failed "file-$i holds '$got'"
		count files $i; usleep 100000
	done
}
long() { # is one file that stays open, in one process: mountpoint-s3 stores a file when the one that opened it closes any descriptor of it
	awk 'BEGIN { while (system("[ ! -e stop ]") == 0) {
		print "line " ++i >"/v/long"; fflush("/v/long")
		print i >".long"; close(".long"); system("mv .long count-long; usleep 100000")
	} }' 2>>errors || failed "writing the long file"
}
given() { # is read as a whole, again and again, and bit by bit through a descriptor that stays open
	exec 3</v/given || failed "opening the given file"
	sum=$(sha256sum </v/given); >copy
	i=0; while [ ! -e stop ]; do i=$((i+1))
		got=$(sha256sum </v/given 2>>errors); [ "$got" = "$sum" ] || failed "the given file has the sum '$got'"
		[ $i -gt %[1]d ] || dd bs=4096 count=1 <&3 >>copy 2>.dd || failed "reading block $i: $(cat .dd)"
		count given $i; usleep 300000
	done
	head -c $(wc -c <copy) /v/given | cmp - copy || failed "what was read bit by bit differs"
}
files & long & given & wait
touch done
exec sleep 1000000`

// workload is a pod that reads and writes a volume all the time and notices whatever goes wrong.
type workload struct {
	ns, name       string
	volume         object
	bucket, prefix string
	mount          mountRecord
	processes      []process
	container      string
	tmp            string // the container's /tmp, from outside
}

// newWorkload starts one and returns when all its loops are under way.
func newWorkload(t testing.TB, ns, name, class string) *workload {
	t.Helper()
	claim(t, ns, name, class, "ReadWriteOnce")
	w := &workload{ns: ns, name: name, volume: bound(t, ns, name)}
	w.bucket, w.prefix = place(t, w.volume)
	put(t, w.bucket, w.prefix+"given", numbered(givenBlocks*4096))
	w.container = podSpec{name: name, claims: map[string]string{"/v": name}, command: fmt.Sprintf(work, givenBlocks)}.run(t,
		ns).Status.ContainerStatuses[0].ContainerID
	w.tmp = inside(t, ns, name, "/tmp")
	w.mount = mountOf(t, w.volume)
	w.processes = w.mount.processes()
	if len(w.processes) != 2 {
		t.Fatalf("the processes of mount %s are %v, want a helper and a client", w.mount.Name, w.processes)
	}
	eventually(t, name+" to begin its work", func() error {
		_, err := os.Stat(filepath.Join(w.tmp, "errors"))
		return err
	})
	w.goesOn(t)
	return w
}

// numbered is a text of that size whose every line tells where it is.
func numbered(size int) string {
	var b strings.Builder
	for b.Len() < size {
		fmt.Fprintf(&b, "%015d\n", b.Len())
	}
	return b.String()[:size]
}

// eachClient are workloads of both clients.
func eachClient(t testing.TB, ns, suffix string) []*workload {
	t.Helper()
	b := bucket(t)
	var all []*workload
	for _, client := range []string{"mountpoint-s3", "rclone"} {
		name := strings.ReplaceAll(client, "-", "") + suffix
		all = append(all, newWorkload(t, ns, name, class(t, map[string]string{"bucketName": b, "client": client})))
	}
	return all
}

// counts says how far the loops are.
func (w *workload) counts(t testing.TB) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for _, loop := range []string{"files", "long", "given"} {
		b, err := os.ReadFile(filepath.Join(w.tmp, "count-"+loop))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		counts[loop], _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	return counts
}

// goesOn waits until each of the loops has gone on.
func (w *workload) goesOn(t testing.TB) {
	t.Helper()
	first := w.counts(t)
	eventually(t, w.name+" to go on", func() error {
		now := w.counts(t)
		for loop, n := range first {
			if now[loop] < n+3 {
				return fmt.Errorf("it was at %v and is at %v; its errors: %s", first, now, w.errors(t))
			}
		}
		return nil
	})
}

// errors are those that the pod has seen.
func (w *workload) errors(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(w.tmp, "errors"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// unharmed does something to the driver or the node, and sees that the workloads go on meanwhile and afterwards, without an
// error, in the same containers and with the same processes.
func unharmed(t *testing.T, all []*workload, do func()) {
	t.Helper()
	before := make([]map[string]int, len(all))
	for i, w := range all {
		before[i] = w.counts(t)
	}
	do()
	for i, w := range all {
		now := w.counts(t)
		for loop, n := range before[i] {
			if now[loop] <= n {
				t.Errorf("%s made no progress meanwhile: it was at %v and is at %v", w.name, before[i], now)
			}
		}
		w.goesOn(t)
		if errors := w.errors(t); errors != "" {
			t.Errorf("%s has seen errors:\n%s", w.name, errors)
		}
		if now := w.mount.processes(); !slices.Equal(now, w.processes) {
			t.Errorf("%s had the processes %v, and has %v", w.name, w.processes, now)
		}
		if c := get(t, "pod", w.ns, w.name).Status.ContainerStatuses[0]; c.RestartCount != 0 || c.ContainerID != w.container {
			t.Errorf("the container of %s was %s and is %s, restarted %d times", w.name, w.container, c.ContainerID, c.RestartCount)
		}
	}
}

// finish lets the workload finish and deletes its pod. Everything that it wrote is in S3 then.
func (w *workload) finish(t testing.TB) {
	t.Helper()
	execute(t, w.ns, w.name, "touch", "/tmp/stop")
	eventually(t, w.name+" to be done", func() error {
		_, err := os.Stat(filepath.Join(w.tmp, "done"))
		return err
	})
	counts, errors := w.counts(t), w.errors(t)
	if errors != "" {
		t.Errorf("%s has seen errors:\n%s", w.name, errors)
	}
	remove(t, "pod", w.ns, w.name)
	var long strings.Builder
	for i := range counts["long"] {
		fmt.Fprintf(&long, "line %d\n", i+1)
	}
	if got := content(t, w.bucket, w.prefix+"long"); got != long.String() {
		t.Errorf("%s: the long file has %d bytes that end with %q, want %d lines", w.name, len(got), got[max(0, len(got)-20):], counts["long"])
	}
	var want []string
	for i := range counts["files"] {
		want = append(want, fmt.Sprintf("%sfile-%d", w.prefix, i+1))
	}
	want = append(want, w.prefix+"given", w.prefix+"long")
	slices.Sort(want)
	if got := keys(t, w.bucket, w.prefix); !slices.Equal(got, want) {
		t.Errorf("%s: S3 has the objects %q, want %q", w.name, got, want)
	}
	for i := range counts["files"] {
		if got := content(t, w.bucket, fmt.Sprintf("%sfile-%d", w.prefix, i+1)); got != fmt.Sprintf("file %d\n", i+1) {
			t.Errorf("%s: file-%d holds %q in S3", w.name, i+1, got)
		}
	}
}

// nextTag is the tag of the driver's next version.
const nextTag = "next"

// importNext builds and imports an image with other programs, of the next version, which do the same as these.
func importNext(t testing.TB) {
	t.Helper()
	bin := t.TempDir()
	for _, name := range driverPrograms {
		b, err := os.ReadFile(filepath.Join(os.Getenv(rig.EnvBin), name))
		if err != nil {
			t.Fatal(err)
		}
		// What is behind a program's end changes the file and not what it does.
		if err := os.WriteFile(filepath.Join(bin, name), append(b, nextTag...), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	repository, _, _ := strings.Cut(world.images.driver, ":")
	image := repository + ":" + nextTag
	archive, err := buildImage(t.Context(), image, bin)
	if err == nil {
		err = world.ImportArchive(t.Context(), image, archive)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// programVersions are those that the node has.
func programVersions(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir(world.Path(nodeHostDir))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names
}

// TestFilesGoOn does to the driver and to the node what operators and crashes do, while pods read and write.
func TestFilesGoOn(t *testing.T) {
	ns := newNamespace(t)
	all := eachClient(t, ns, "")
	t.Run("upgrade", func(t *testing.T) {
		importNext(t)
		unharmed(t, all, func() { replaced(t, func() { deploy(t, "image.tag="+nextTag) }) })
		if got := driverPod(t); !strings.HasSuffix(image(t, got), ":"+nextTag) {
			t.Errorf("the driver is %s", image(t, got))
		}
		// The mounts have the programs that they were started with.
		if v := programVersions(t); len(v) != 2 {
			t.Errorf("the node has the versions %q, want two", v)
		}
	})
	t.Run("rollback", func(t *testing.T) {
		unharmed(t, all, func() {
			replaced(t, func() {
				if _, err := world.Helm(t.Context(), "rollback", release, "--namespace", driverNamespace); err != nil {
					t.Fatal(err)
				}
				if err := world.deployed(t.Context()); err != nil {
					t.Fatal(err)
				}
			})
		})
		if got := image(t, driverPod(t)); got != world.images.driver {
			t.Errorf("the driver is %s", got)
		}
		eventually(t, "the other version to be cleared away", func() error {
			if v := programVersions(t); len(v) != 1 {
				return fmt.Errorf("the node has the versions %q", v)
			}
			return nil
		})
	})
	t.Run("the driver's pod is deleted", func(t *testing.T) {
		unharmed(t, all, func() {
			replaced(t, func() { remove(t, "pod", driverNamespace, driverPod(t).Metadata.Name) })
		})
	})
	t.Run("the driver is killed", func(t *testing.T) {
		unharmed(t, all, func() {
			replaced(t, func() { driverProcess(t).kill(t) })
		})
	})
	for _, unit := range []string{"kubelet", "containerd"} {
		t.Run(unit+" is restarted", func(t *testing.T) {
			unharmed(t, all, func() {
				restart(t, unit)
				// A pod that comes afterwards gets the volumes, and what is unpublished of it goes.
				for _, w := range all {
					name := w.name + "-" + unit
					podSpec{name: name, claims: map[string]string{"/v": w.name}}.run(t, ns)
					if got := execute(t, ns, name, "cat", "/v/file-1"); got != "file 1\n" {
						t.Errorf("%s: the file holds %q", name, got)
					}
					remove(t, "pod", ns, name)
				}
			})
		})
	}
	for _, w := range all {
		w.finish(t)
	}
	nothingLeft(t)
}

// TestADeletedPodWaitsForItsFiles deletes a pod whose files are being stored: it is there until they are.
func TestADeletedPodWaitsForItsFiles(t *testing.T) {
	ns := newNamespace(t)
	t.Cleanup(func() { world.slow.Set(faultproxy.Faults{}) })
	s := &service{ns: ns, name: "slow"}
	claim(t, ns, s.name, class(t, map[string]string{"bucketName": bucket(t), "client": "rclone", "backend": "slow"}), "ReadWriteOnce")
	s.volume = bound(t, ns, s.name)
	s.bucket, s.prefix = place(t, s.volume)
	podSpec{name: s.name, claims: map[string]string{"/v": s.name}}.run(t, ns)
	m := mountOf(t, s.volume)
	world.slow.Set(faultproxy.Faults{Bandwidth: slowly})
	sums := execute(t, ns, s.name, "sh", "-c", writeScript("file", 20))
	kubectl(t, "delete", "pod", "-n", ns, s.name, "--wait=false")
	eventually(t, "the mount to be drained", func() error {
		if n := metric(t, `s3csi_mounts{client="rclone",state="draining"`); n != 1 {
			return fmt.Errorf("%v are", n)
		}
		return nil
	})
	// The container is gone, the pod is not, and nothing is stored.
	eventually(t, "the container to end", func() error {
		if c := get(t, "pod", ns, s.name).Status.ContainerStatuses[0]; c.State.Terminated == nil {
			return errors.New("it runs")
		}
		return nil
	})
	if got := keys(t, s.bucket, s.prefix); len(got) > 0 {
		t.Fatalf("S3 has %q: the test is worth nothing", got)
	}
	world.slow.Set(faultproxy.Faults{})
	eventually(t, "the pod to be gone", func() error {
		if _, there := find(t, "pod", ns, s.name); there {
			return errors.New("it is there")
		}
		return nil
	})
	// Not one moment later.
	if got := len(keys(t, s.bucket, s.prefix)); got != 20 {
		t.Errorf("the pod is gone, and S3 has %d files of 20", got)
	}
	s.stored(t, sums)
	if left := m.processes(); len(left) > 0 {
		t.Errorf("left of the mount: %v", left)
	}
	nothingLeft(t)
}
