//go:build linux

package mountpoint

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// behind returns a proxy in front of the bench's server, and an invocation that uses it.
func (b *bench) behind(t *testing.T, mountOptions ...string) (*faultproxy.Proxy, client.Invocation) {
	t.Helper()
	proxy := rigtest.Proxy(t, b.server.Endpoint())
	in := invocation(t, proxy.Endpoint(), b.server.Region())
	in.Options = options(t, mountOptions...)
	return proxy, in
}

// mountBehind mounts the bucket behind a proxy.
func (b *bench) mountBehind(t *testing.T, mountOptions ...string) (*faultproxy.Proxy, *mounted) {
	t.Helper()
	proxy, in := b.behind(t, mountOptions...)
	return proxy, mount(t, in, b.keys, nil)
}

// record passes requests on and notes those that change something.
type record struct {
	mu       sync.Mutex
	requests []string
}

func (c *record) quirk(w http.ResponseWriter, r *http.Request, forward http.Handler) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		c.mu.Lock()
		c.requests = append(c.requests, r.Method+" "+strings.TrimPrefix(r.URL.Path, "/"+bucket+"/"))
		c.mu.Unlock()
	}
	forward.ServeHTTP(w, r)
}

func (c *record) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	requests := c.requests
	c.requests = nil
	return requests
}

func isComplete(r *http.Request) bool {
	return r.Method == http.MethodPost && r.URL.Query().Has("uploadId")
}

func TestEmptyFile_IsStoredByOnePutObjectWhenCloseReturns(t *testing.T) {
	b := newOwnBench(t)
	shell := func(script string) func(path string) error {
		return func(path string) error {
			out, err := exec.CommandContext(t.Context(), "sh", "-c", script, "sh", path).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}
	}
	for _, option := range []string{"upload-checksums=crc32c", "upload-checksums=off", "upload-checksums=crc64nvme"} {
		t.Run(option, func(t *testing.T) {
			proxy, in := b.behind(t, option)
			requests := &record{}
			proxy.Set(faultproxy.Faults{Quirk: requests.quirk})
			m := mount(t, in, b.keys, nil)
			for name, write := range map[string]func(path string) error{
				"create": func(path string) error { return overwrite(path, "") },
				"touch":  shell(`touch "$1"`),
				"shell":  shell(`: > "$1"`),
				"cp":     shell(`cp /dev/null "$1"`),
				"fsync": func(path string) error {
					f, err := os.Create(path)
					if err != nil {
						return err
					}
					if err := f.Sync(); err != nil {
						return err
					}
					return f.Close()
				},
				"closed in a duplicate": func(path string) error {
					f, err := os.Create(path)
					if err != nil {
						return err
					}
					fd, err := unix.Dup(int(f.Fd()))
					if err != nil {
						return err
					}
					if err := f.Close(); err != nil {
						return err
					}
					return unix.Close(fd)
				},
				"inherited": shell(`exec 3> "$1"; sleep 0 & wait; exec 3>&-`),
			} {
				for _, existing := range []bool{false, true} {
					if existing && (name == "touch" || name == "create") { // touch does not truncate
						continue
					}
					key := strings.ReplaceAll(name, " ", "-") + option
					if existing {
						b.put(t, "volume/"+key, "the old content")
					}
					requests.take()
					want(t, name, write(m.at(key)), 0)
					if got, ok := b.get(t, "volume/"+key); !ok || len(got) > 0 {
						t.Errorf("%s (existing: %t): the object exists: %t, %q", name, existing, ok, got)
					}
					if got := requests.take(); !slices.Equal(got, []string{"PUT volume/" + key}) {
						t.Errorf("%s (existing: %t): %q", name, existing, got)
					}
					_, err := os.Stat(m.at(key))
					want(t, "stat", err, 0)
				}
			}
			m.unmount(t)
		})
	}
}

// A program may close one descriptor of a new file and write through another, as dd and shells do.
func TestEmptyFile_CanStillBeWrittenThroughADuplicate(t *testing.T) {
	b := newOwnBench(t)
	m := mount(t, b.invocation(t), b.keys, nil)
	for _, script := range []string{
		`echo content > "$1"`, `(sleep 0; echo content) > "$1"`, `printf 'content\n' | dd of="$1" status=none`, `exec 3> "$1"; echo content >&3`,
	} {
		if out, err := exec.CommandContext(t.Context(), "sh", "-c", script, "sh", m.at("f")).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", script, err, out)
		}
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) { // another process may have closed it
			got, _ := b.get(t, "volume/f")
			if string(got) == "content\n" {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%s: the object has %q", script, got)
			}
		}
		want(t, "remove", os.Remove(m.at("f")), 0)
	}
	m.unmount(t)
}

func TestEmptyFile_ThatCannotBeStoredFailsTheClose(t *testing.T) {
	b := newOwnBench(t)
	proxy, m := b.mountBehind(t)
	proxy.Set(faultproxy.Faults{Deny: true, Match: func(r *http.Request) bool { return r.Method == http.MethodPut }})
	want(t, "write", overwrite(m.at("f"), ""), syscall.EIO)
	proxy.Set(faultproxy.Faults{})
	m.unmount(t)
}

// A file that another process closes than opened it is stored after the close. The helper learns which one could not be stored.
func TestUnstoredFile_IsReportedByNameAndReason(t *testing.T) {
	b := newOwnBench(t)
	proxy, m := b.mountBehind(t)
	f, err := os.Create(m.at("lost"))
	if err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), "sh", "-c", "read go; echo content >&3")
	child.ExtraFiles = []*os.File{f}
	begin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	want(t, "start", child.Start(), 0)
	want(t, "close", f.Close(), 0)
	proxy.Set(faultproxy.Faults{Deny: true, Match: func(r *http.Request) bool { return r.Method == http.MethodPut || isComplete(r) }})
	_, err = begin.Write([]byte("\n"))
	want(t, "begin", err, 0)
	want(t, "the child", child.Wait(), 0)
	m.unmount(t)
	line := ""
	for l := range strings.Lines(m.stdout.String()) {
		if strings.HasPrefix(l, "s3-csi-unstored ") {
			line = l
		}
	}
	u, ok := mountpointS3(t).Unstored(line)
	if !ok || u.Files != 1 || u.Name != "volume/lost" || !strings.Contains(u.Reason, "AccessDenied") {
		t.Errorf("%+v of %q in\n%s", u, line, m.stdout.String())
	}
}

func TestClosedFile_CanBeRemovedAtOnce(t *testing.T) {
	b := newOwnBench(t)
	_, m := b.mountBehind(t)
	for n := range 20 {
		if out, err := exec.CommandContext(t.Context(), "sh", "-c", `touch "$1" && rm "$1"`, "sh", m.at("f")).CombinedOutput(); err != nil {
			t.Fatalf("%d: %v: %s", n, err, out)
		}
		if _, ok := b.get(t, "volume/f"); ok {
			t.Fatalf("%d: the object is there", n)
		}
	}
	m.unmount(t)
}

func TestOpenFile_RefusesOtherSizesAndWritesAfterFsync(t *testing.T) {
	b := newOwnBench(t)
	m := mount(t, b.invocation(t), b.keys, nil)
	f, err := os.Create(m.at("f"))
	if err != nil {
		t.Fatal(err)
	}
	want(t, "truncate to its size of 0", f.Truncate(0), 0)
	want(t, "truncate of what is not written", f.Truncate(100), syscall.EPERM)
	_, err = f.WriteString("12345")
	want(t, "write", err, 0)
	want(t, "truncate to its size", f.Truncate(5), 0)
	for _, size := range []int64{0, 3, 6, 1 << 30} {
		want(t, fmt.Sprint("truncate to ", size), f.Truncate(size), syscall.EPERM)
		want(t, fmt.Sprint("truncate by path to ", size), os.Truncate(m.at("f"), size), syscall.EPERM)
	}
	want(t, "allocate", unix.Fallocate(int(f.Fd()), 0, 0, 100), syscall.EOPNOTSUPP)
	want(t, "fsync", f.Sync(), 0)
	_, err = f.WriteString("678")
	want(t, "write after fsync", err, syscall.EOPNOTSUPP)
	want(t, "truncate after fsync", f.Truncate(3), syscall.EPERM)
	_ = f.Close()
	if got, _ := b.get(t, "volume/f"); string(got) != "12345" {
		t.Errorf("the object has %q", got)
	}
	want(t, "truncate of a stored file", os.Truncate(m.at("f"), 2), syscall.EPERM)
	m.unmount(t)
	if !strings.Contains(m.stderr.String(), "volume/f") || !strings.Contains(m.stderr.String(), "fsync") {
		t.Errorf("the log names neither file nor cause:\n%s", m.stderr.String())
	}
}

// A container has a subPath as a bind mount of a directory. Other writers can empty the directory and write to it again.
func TestSubPath_ServesADirectoryThatCameBack(t *testing.T) {
	b := newOwnBench(t)
	for _, name := range []string{"d", "a/b/d"} {
		b.put(t, "volume/"+name+"/old", "old")
	}
	m := mount(t, b.invocation(t), b.keys, nil)
	for _, name := range []string{"d", "a/b/d"} {
		for _, remote := range []bool{true, false} {
			sub := t.TempDir()
			want(t, "bind", unix.Mount(m.at(name), sub, "", unix.MS_BIND, ""), 0)
			t.Cleanup(func() { _ = unix.Unmount(sub, unix.MNT_DETACH) })
			key := "volume/" + name + "/old"
			if remote {
				_, err := b.s3.DeleteObject(t.Context(), &s3.DeleteObjectInput{Bucket: aws.String(bucket), Key: &key})
				want(t, "delete", err, 0)
			} else {
				want(t, "remove", os.Remove(m.at(name+"/old")), 0)
			}
			_, err := os.Stat(m.at(name + "/old"))
			want(t, "stat of what was removed", err, syscall.ENOENT)
			for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				_, _ = os.Stat(m.at(name)) // the kernel finds out that the directory is gone, when it does not believe its cache any more
			}
			_, err = os.Stat(sub)
			want(t, "stat of the empty subPath", err, 0)
			if got := names(t, sub); len(got) > 0 {
				t.Errorf("the empty subPath has %q", got)
			}
			b.put(t, key, "back")
			_, err = os.Stat(m.at(name + "/old"))
			want(t, "stat of what came back", err, 0)
			_, err = os.Stat(sub)
			want(t, "stat of the subPath", err, 0)
			for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(100 * time.Millisecond) { // longer than what is cached
				if got := names(t, sub); !slices.Equal(got, []string{"old"}) {
					t.Errorf("the subPath has %q", got)
				}
			}
			if got, err := os.ReadFile(sub + "/old"); string(got) != "back" {
				t.Errorf("the file in the subPath has %q, %v", got, err)
			}
			want(t, "write in the subPath", overwrite(sub+"/new", "new"), 0)
			if got, err := os.ReadFile(m.at(name + "/new")); string(got) != "new" {
				t.Errorf("the new file has %q, %v", got, err)
			}
			want(t, "mkdir in the subPath", os.MkdirAll(sub+"/x/y", 0o755), 0)
			want(t, "write below it", overwrite(sub+"/x/y/z", "z"), 0)
			want(t, "remove it", os.RemoveAll(m.at(name+"/x")), 0)
			want(t, "remove", os.Remove(sub+"/new"), 0)
			want(t, "unbind", unix.Unmount(sub, 0), 0)
		}
	}
	m.unmount(t)
}

func TestThrottling_With429IsRetriedUnderAnyCode(t *testing.T) {
	b := newOwnBench(t)
	large := make([]byte, 20<<20)
	_, _ = rand.Read(large)
	for _, code := range []string{"SlowDown", "TooManyRequests", "rateLimitExceeded", ""} {
		t.Run("code "+code, func(t *testing.T) {
			proxy, in := b.behind(t)
			proxy.Set(faultproxy.Faults{Quirk: faultproxy.Throttled(code)})
			m := mount(t, in, b.keys, nil)
			name := "f" + code
			want(t, "write", os.WriteFile(m.at(name), large, 0o600), 0)
			want(t, "write of an empty file", overwrite(m.at(name+"-empty"), ""), 0)
			got, err := os.ReadFile(m.at(name))
			if err != nil || !bytes.Equal(got, large) {
				t.Errorf("read %d bytes, %v", len(got), err)
			}
			want(t, "rename", os.Rename(m.at(name), m.at(name+"-2")), 0)
			if got := names(t, m.dir); !slices.Contains(got, name+"-2") {
				t.Errorf("the root has %q", got)
			}
			want(t, "remove", os.Remove(m.at(name+"-2")), 0)
			m.unmount(t)
		})
	}
}

func TestUnclearUpload_IsSettledByTheObject(t *testing.T) {
	b := newOwnBench(t)
	large := make([]byte, 12<<20)
	_, _ = rand.Read(large)
	put := func(r *http.Request) bool { return r.Method == http.MethodPut && !r.URL.Query().Has("uploadId") }
	refuse := func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		faultproxy.Refuse(w, r, http.StatusInternalServerError, "InternalError", "We encountered an internal error.")
	}
	for name, tt := range map[string]struct {
		match   func(*http.Request) bool
		quirk   faultproxy.Quirk
		content []byte
		old     string // that the object has before
		want    syscall.Errno
		long    bool
	}{
		"complete without an ETag":            {match: isComplete, quirk: faultproxy.WithoutETag, content: large},
		"complete that replaces, no ETag":     {match: isComplete, quirk: faultproxy.WithoutETag, content: large, old: "old"},
		"complete without an answer":          {match: isComplete, quirk: faultproxy.Unanswered, content: large},
		"complete that fails":                 {match: isComplete, quirk: refuse, content: large, want: syscall.EIO},
		"complete that fails, same size":      {match: isComplete, quirk: refuse, content: large, old: strings.Repeat("x", len(large)), want: syscall.EIO},
		"complete after 75 s":                 {match: isComplete, quirk: faultproxy.Late(75 * time.Second), content: large, long: true},
		"put of an empty file without ETag":   {match: put, quirk: faultproxy.WithoutETag},
		"put of an empty file without answer": {match: put, quirk: faultproxy.Unanswered},
		"put of an empty file that fails":     {match: put, quirk: refuse, want: syscall.EIO},
		"put over a file that fails":          {match: put, quirk: refuse, old: "old", want: syscall.EIO},
	} {
		for _, checksums := range []string{"crc32c", "off"} {
			t.Run(name+" "+checksums, func(t *testing.T) {
				t.Parallel()
				if tt.long && (testing.Short() || checksums == "off") {
					t.Skip("waits for a timeout")
				}
				proxy, in := b.behind(t, "upload-checksums="+checksums)
				m := mount(t, in, b.keys, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "AWS_MAX_ATTEMPTS=2") })
				key := strings.ReplaceAll(name, " ", "-") + checksums
				if tt.old != "" {
					b.put(t, "volume/"+key, tt.old)
				}
				proxy.Set(faultproxy.Faults{Match: tt.match, Quirk: tt.quirk})
				want(t, "write", os.WriteFile(m.at(key), tt.content, 0o600), tt.want)
				m.unmount(t) // before the fault ends: an upload that failed is tried again when the kernel releases the file
				wanted := tt.content
				if tt.want != 0 {
					wanted = []byte(tt.old)
				}
				if got, ok := b.get(t, "volume/"+key); ok != (tt.want == 0 || tt.old != "") || !bytes.Equal(got, wanted) {
					t.Errorf("the object exists: %t, with %d bytes", ok, len(got))
				}
			})
		}
	}
}

func TestListing_EndsOrFailsWithOddTokens(t *testing.T) {
	b := newOwnBench(t)
	for n := range 3 {
		b.put(t, fmt.Sprintf("volume/d/%d", n), "")
	}
	for name, tt := range map[string]struct {
		change func(xml string) string
		want   syscall.Errno
	}{
		"the same token": {func(xml string) string { return faultproxy.Truncated(xml, "again") }, syscall.EIO},
		"two tokens in turn": {func() func(string) string {
			n := 0
			return func(xml string) string { n++; return faultproxy.Truncated(xml, fmt.Sprint("token", n%2)) }
		}(), syscall.EIO},
		"the same page with new tokens": {func() func(string) string {
			n := 0
			return func(xml string) string { n++; return faultproxy.Truncated(xml, fmt.Sprint("token", n)) }
		}(), syscall.EIO},
		"no token": {func(xml string) string { return faultproxy.Truncated(xml, "") }, syscall.EIO},
		"an empty token": {func(xml string) string {
			return strings.Replace(xml, "</ListBucketResult>", "<NextContinuationToken></NextContinuationToken></ListBucketResult>", 1)
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			proxy, in := b.behind(t)
			m := mount(t, in, b.keys, nil)
			listing := func(r *http.Request) bool {
				return r.URL.Query().Get("prefix") == "volume/d/" && r.URL.Query().Get("max-keys") != "1"
			}
			// The service does not know the tokens.
			unknown := faultproxy.ListedAs(tt.change)
			quirk := func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
				if !r.URL.Query().Has("continuation-token") {
					unknown(w, r, forward)
					return
				}
				w.Header().Set("Content-Type", "application/xml")
				fmt.Fprint(w, tt.change(`<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>volume/d/0</Key>`+
					`<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>"e"</ETag><Size>0</Size></Contents></ListBucketResult>`))
			}
			before := proxy.Requests()
			proxy.Set(faultproxy.Faults{Match: listing, Quirk: quirk})
			got, err := os.ReadDir(m.at("d"))
			want(t, "listing", err, tt.want)
			if tt.want == 0 && len(got) != 3 {
				t.Errorf("%d names", len(got))
			}
			if n := proxy.Requests() - before; n > 20 {
				t.Errorf("%d requests", n)
			}
			proxy.Set(faultproxy.Faults{})
			m.unmount(t)
		})
	}
}

func TestClient_MountsWhereListingsHaveAnEmptyToken(t *testing.T) {
	b := newOwnBench(t)
	b.put(t, "volume/f", "f")
	proxy, in := b.behind(t)
	proxy.Set(faultproxy.Faults{Quirk: faultproxy.ListedAs(func(xml string) string {
		return strings.Replace(xml, "</ListBucketResult>", "<NextContinuationToken/></ListBucketResult>", 1)
	})})
	m := mount(t, in, b.keys, nil)
	if got := names(t, m.dir); !slices.Equal(got, []string{"f"}) {
		t.Errorf("the root has %q", got)
	}
	m.unmount(t)
}

func TestDirectoryMarker_IsRemovedOnlyWithoutOtherKeys(t *testing.T) {
	b := newOwnBench(t)
	for _, key := range []string{"d/", "d/sub/", "d/sub/f", "e/", "full/", "full/f", "moved/", "moved/f", "moved/empty/", "data/", "odd/"} {
		b.put(t, "volume/"+key, "")
	}
	proxy, in := b.behind(t)
	proxy.Set(faultproxy.Faults{Quirk: faultproxy.ListedAs(func(xml string) string { // the server stores neither
		if strings.Contains(xml, "<Key>volume/data/</Key>") {
			xml = strings.Replace(xml, "<Size>0</Size>", "<Size>7</Size>", 1)
		}
		if at := strings.Index(xml, "</Contents>"); at > 0 && strings.Contains(xml[:at], "<Key>volume/odd/</Key>") {
			end := at + len("</Contents>")
			first := xml[strings.LastIndex(xml[:at], "<Contents>"):end]
			xml = xml[:end] + strings.Replace(first, "volume/odd/", "volume/odd//f", 1) + xml[end:]
		}
		return xml
	})})
	m := mount(t, in, b.keys, nil)
	want(t, "rmdir of one with a file", unix.Rmdir(m.at("full")), syscall.ENOTEMPTY)
	want(t, "rmdir of one with content", unix.Rmdir(m.at("data")), syscall.ENOTEMPTY)
	want(t, "rmdir of one with a key that is no name", unix.Rmdir(m.at("odd")), syscall.ENOTEMPTY)
	want(t, "mkdir", os.Mkdir(m.at("e/local"), 0o755), 0)
	want(t, "rmdir of one with a local directory", unix.Rmdir(m.at("e")), syscall.ENOTEMPTY)
	want(t, "rmdir of it", unix.Rmdir(m.at("e/local")), 0)
	f, err := os.Create(m.at("e/open"))
	want(t, "create", err, 0)
	want(t, "rmdir of one with an open file", unix.Rmdir(m.at("e")), syscall.ENOTEMPTY)
	want(t, "close", f.Close(), 0)
	want(t, "remove", os.Remove(m.at("e/open")), 0)
	want(t, "rmdir", unix.Rmdir(m.at("e")), 0)
	want(t, "rm -r", os.RemoveAll(m.at("d")), 0)
	if out, err := exec.CommandContext(t.Context(), "mv", m.at("moved"), m.at("there")).CombinedOutput(); err != nil {
		t.Errorf("mv: %v: %s", err, out)
	}
	for _, name := range []string{"d", "e", "moved"} {
		_, err := os.Stat(m.at(name))
		want(t, "stat of "+name, err, syscall.ENOENT)
	}
	want(t, "mkdir again", os.Mkdir(m.at("d"), 0o755), 0)
	want(t, "write", overwrite(m.at("d/f"), "f"), 0)
	m.unmount(t)
	out, err := b.s3.ListObjectsV2(t.Context(), &s3.ListObjectsV2Input{Bucket: aws.String(bucket)})
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, o := range out.Contents {
		keys = append(keys, *o.Key)
	}
	if want := []string{"volume/d/f", "volume/data/", "volume/full/", "volume/full/f", "volume/odd/", "volume/there/f"}; !slices.Equal(keys, want) {
		t.Errorf("the bucket has %q, want %q", keys, want)
	}

	in.Options = options(t, "allow-delete=false")
	b.put(t, "volume/kept/", "")
	m = mount(t, in, b.keys, nil)
	want(t, "rmdir without deletes", unix.Rmdir(m.at("kept")), syscall.EPERM)
	m.unmount(t)
	if _, ok := b.get(t, "volume/kept/"); !ok {
		t.Error("the marker is gone")
	}
}

// A service, or a cache in front of it, may answer with other bytes than those that were asked for.
func TestRead_RefusesOtherBytesThanThoseAskedFor(t *testing.T) {
	b := newOwnBench(t)
	content := bytes.Repeat([]byte("0123456789abcdef"), 24<<20/16)
	newer := bytes.Repeat([]byte("X"), len(content))
	b.put(t, "volume/f", string(content))
	for name, tt := range map[string]struct {
		ranges bool
		body   []byte
		etag   string // "": the right one
		want   syscall.Errno
	}{
		"Range is ignored":            {body: content, want: syscall.EIO},
		"If-Match is ignored":         {ranges: true, body: newer, etag: `"another"`, want: syscall.ESTALE},
		"an ETag without quotes":      {ranges: true, body: content, etag: "bare"},
		"a weak form of the same one": {ranges: true, body: content, etag: "weak"},
	} {
		t.Run(name, func(t *testing.T) {
			proxy, in := b.behind(t)
			m := mount(t, in, b.keys, nil)
			head, err := b.s3.HeadObject(t.Context(), &s3.HeadObjectInput{Bucket: aws.String(bucket), Key: aws.String("volume/f")})
			if err != nil {
				t.Fatal(err)
			}
			etag := tt.etag
			switch etag {
			case "":
				etag = *head.ETag
			case "bare":
				etag = strings.Trim(*head.ETag, `"`)
			case "weak":
				etag = "W/" + *head.ETag
			}
			proxy.Set(faultproxy.Faults{Quirk: faultproxy.Content(tt.ranges, func() ([]byte, string) { return tt.body, etag })})
			started := pressure.Now()
			for _, offset := range []int64{0, 10 << 20} {
				f, err := os.Open(m.at("f"))
				if err != nil {
					t.Fatal(err)
				}
				part := make([]byte, 1<<20)
				_, err = f.ReadAt(part, offset)
				want(t, fmt.Sprint("read at ", offset), err, tt.want)
				if tt.want == 0 && !bytes.Equal(part, content[offset:offset+1<<20]) {
					t.Errorf("wrong bytes at %d", offset)
				}
				_ = f.Close()
			}
			if took := started.Since(); took > bound {
				t.Errorf("the reads took %s", took)
			}
			proxy.Set(faultproxy.Faults{})
			m.unmount(t)
		})
	}
}

// A file that is replaced while it is read is not a mixture, even if the service ignores the condition.
func TestRead_DoesNotMixVersions(t *testing.T) {
	b := newOwnBench(t)
	content := bytes.Repeat([]byte("A"), 64<<20)
	newer := bytes.Repeat([]byte("B"), len(content))
	b.put(t, "volume/f", string(content))
	proxy, m := b.mountBehind(t)
	f, err := os.Open(m.at("f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	part := make([]byte, 1<<20)
	_, err = f.ReadAt(part, 0)
	want(t, "read", err, 0)
	proxy.Set(faultproxy.Faults{Quirk: faultproxy.Content(true, func() ([]byte, string) { return newer, `"another"` })})
	for offset := int64(0); offset < int64(len(content)); offset += 1 << 20 {
		if _, err = f.ReadAt(part, offset); err != nil {
			break
		}
		if part[0] != 'A' {
			t.Fatalf("the newer content is at %d", offset)
		}
	}
	want(t, "read of what was replaced", err, syscall.ESTALE)
	proxy.Set(faultproxy.Faults{})
}

func TestClient_WorksBehindAFrontEndThatChangesRequests(t *testing.T) {
	b := newOwnBench(t)
	proxy, in := b.behind(t, "upload-checksums=off")
	proxy.Set(faultproxy.Faults{Quirk: faultproxy.FrontEnd})
	m := mount(t, in, b.keys, nil)
	want(t, "write", overwrite(m.at("f"), "content"), 0)
	want(t, "rename", os.Rename(m.at("f"), m.at("g")), 0)
	if got, err := os.ReadFile(m.at("g")); string(got) != "content" {
		t.Errorf("%q, %v", got, err)
	}
	want(t, "remove", os.Remove(m.at("g")), 0)
	m.unmount(t)
}
