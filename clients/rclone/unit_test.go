package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/rclone/rclone/backend/local"
	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/config/configmap"
	"github.com/rclone/rclone/lib/ranges"
)

func TestParseArgsReadsEveryFlag(t *testing.T) {
	c, err := parseArgs(strings.Fields(`--bucket=b-b --prefix=p/q/ --endpoint=https://s3:9000 --region=eu-1 --path-style
		--read-only=false --uid=0 --gid=4294967294 --dir-mode=0700 --file-mode=600 --cache-dir=/c --cache-size=2Gi --fuse-fd=5
		--read-cache --dir-cache-time=0s --write-back=2s --read-ahead=0 --transfers=8 --part-size=16Mi --server-mtime
		--directory-markers --conditional-writes --storage-class=STANDARD_IA --sse=aws:kms --sse-kms-key-id=arn:aws:kms:eu-1:1:key/a-b --cache-poll-interval=1m --upload-cutoff=8Mi --low-level-retries=3`))
	if err != nil {
		t.Fatal(err)
	}
	want := config{
		bucket: "b-b", prefix: "p/q/", endpoint: "https://s3:9000", region: "eu-1", pathStyle: true, gid: 4294967294,
		dirMode: 0o700, fileMode: 0o600, cacheDir: "/c", cacheSize: 2 * fs.Gibi, fuseFD: 5, readCache: true, writeBack: 2 * time.Second,
		transfers: 8, partSize: 16 * fs.Mebi, cachePoll: time.Minute, uploadCutoff: 8 * fs.Mebi, attempts: 3, serverMtime: true, directoryMarkers: true, conditionalWrites: true, storageClass: "STANDARD_IA",
		sse: "aws:kms", sseKMSKeyID: "arn:aws:kms:eu-1:1:key/a-b",
	}
	if c != want {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
}

func TestParseArgsRefusesAndNamesTheFlag(t *testing.T) {
	cases := map[string]string{
		"--cache-dir=/c":                                      "--bucket",
		"--bucket=a/b --cache-dir=/c":                         "--bucket",
		"--bucket=b":                                          "--cache-dir",
		"--bucket=b --cache-dir=c":                            "--cache-dir",
		"--bucket=b --cache-dir=/c --prefix=p":                "--prefix",
		"--bucket=b --cache-dir=/c --prefix=/p/":              "--prefix",
		"--bucket=b --cache-dir=/c --prefix=p//q/":            "--prefix",
		"--bucket=b --cache-dir=/c --prefix=p/../":            "--prefix",
		"--bucket=b --cache-dir=/c --fuse-fd=0":               "--fuse-fd",
		"--bucket=b --cache-dir=/c --fuse-fd=x":               "fuse-fd",
		"--bucket=b --cache-dir=/c --uid=-1":                  "uid",
		"--bucket=b --cache-dir=/c --uid=4294967295":          "uid",
		"--bucket=b --cache-dir=/c --dir-mode=1777":           "dir-mode",
		"--bucket=b --cache-dir=/c --file-mode=9":             "file-mode",
		"--bucket=b --cache-dir=/c --endpoint=s3:9000":        "--endpoint",
		"--bucket=b --cache-dir=/c --endpoint=ftp://s3":       "--endpoint",
		"--bucket=b --cache-dir=/c --endpoint=http://u:p@s3":  "--endpoint",
		"--bucket=b --cache-dir=/c --bucket=c":                "bucket",
		"--bucket=b --cache-dir=/c --read-only --read-only":   "read-only",
		"--bucket=b --cache-dir=/c --read-only=yes":           "read-only",
		"--bucket=b --cache-dir=/c --cache-size=1X":           "cache-size",
		"--bucket=b --cache-dir=/c --cache-size=off":          "--cache-size",
		"--bucket=b --cache-dir=/c --cache-size=9999999999Ti": "cache-size",
		"--bucket=b --cache-dir=/c --cache-size=1":            "--cache-size",
		"--bucket=b --cache-dir=/c --dir-cache-time=10":       "dir-cache-time",
		"--bucket=b --cache-dir=/c --dir-cache-time=-1s":      "--dir-cache-time",
		"--bucket=b --cache-dir=/c --write-back=0s":           "--write-back",
		"--bucket=b --cache-dir=/c --transfers=0":             "--transfers",
		"--bucket=b --cache-dir=/c --part-size=4Mi":           "--part-size",
		"--bucket=b --cache-dir=/c --storage-class=x;y":       "--storage-class",
		"--bucket=b --cache-dir=/c --sse=none":                "--sse",
		"--bucket=b --cache-dir=/c --sse-kms-key-id=x":        "--sse-kms-key-id",
		"--bucket=b --cache-dir=/c --config=/etc/rclone.conf": "config",
		"--bucket=b --cache-dir=/c --read-ahead=2Gi":          "--read-ahead",
		"--bucket=b --cache-dir=/c -- x":                      `"x"`,
	}
	for line, want := range cases {
		if _, err := parseArgs(strings.Fields(line)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error that names %s", line, err, want)
		}
	}
}

func FuzzParseArgs(f *testing.F) {
	f.Add("--bucket=b\x00--cache-dir=/c\x00--cache-size=1Gi")
	f.Add("--bucket=b\x00--prefix=a/\x00--read-only\x00--dir-mode=0755")
	f.Fuzz(func(t *testing.T, line string) {
		c, err := parseArgs(strings.Split(line, "\x00"))
		if err != nil {
			return
		}
		if c.bucket == "" || c.fuseFD < 3 || c.cacheSize < minCacheSize || c.prefix != "" && !strings.HasSuffix(c.prefix, "/") || hasControl(c.prefix) {
			t.Errorf("%q gives %+v", line, c)
		}
	})
}

func TestSizesAreInBytes(t *testing.T) {
	for text, want := range map[string]fs.SizeSuffix{"0": 0, "1073741824": fs.Gibi, "5242880": 5 * fs.Mebi, "512Ki": 512 * fs.Kibi, "16Mi": 16 * fs.Mebi, "1.5Gi": 3 * fs.Gibi / 2, "2Ti": 2 * fs.Tebi} {
		var got fs.SizeSuffix
		if err := (*size)(&got).Set(text); err != nil || got != want {
			t.Errorf("%s is %d, %v; want %d", text, got, err, want)
		}
	}
}

func TestCleanEnvironmentIsWithoutRcloneAndStable(t *testing.T) {
	clean := cleanEnvironment([]string{"A=1", "RCLONE_READ_ONLY=true", "HOME=", "RCLONE_CONFIG=/etc/x", "_RCLONE_CONFIG_KEY_FILE=x", noConfig, noConfig})
	if want := []string{"A=1", noConfig, "HOME=/nonexistent"}; !slices.Equal(clean, want) {
		t.Errorf("got %q, want %q", clean, want)
	}
	if again := cleanEnvironment(clean); !slices.Equal(again, clean) {
		t.Errorf("cleaned again it is %q: the program would execute itself forever", again)
	}
}

func TestReporterIsThrottledAndNeverBlocks(t *testing.T) {
	var out bytes.Buffer
	r := newReporter(&out)
	at := time.Now()
	r.queue(at, queueStatus{})
	r.queue(at, queueStatus{3, 30})
	r.queue(at.Add(time.Millisecond), queueStatus{2, 20})
	r.queue(at.Add(2*time.Second), queueStatus{2, 20})
	r.queue(at.Add(2*time.Second+time.Millisecond), queueStatus{})
	r.queue(at.Add(9*time.Second), queueStatus{})
	r.close()
	want := "s3-csi-queue {\"uploads\":3,\"bytes\":30}\ns3-csi-queue {\"uploads\":2,\"bytes\":20}\ns3-csi-queue {\"uploads\":0,\"bytes\":0}\n"
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}

	read, write := io.Pipe() // without a reader
	defer read.Close()
	stuck := newReporter(write)
	for i := range 100 {
		stuck.send("line")
		stuck.queue(at.Add(time.Duration(i)*time.Hour), queueStatus{Uploads: i})
	}
}

// fakeFS counts open files.
type fakeFS struct {
	fuse.RawFileSystem
	mu   sync.Mutex
	next uint64
	open map[uint64]bool
}

func (f *fakeFS) Open(_ <-chan struct{}, _ *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next++
	out.Fh = f.next
	f.open[out.Fh] = true
	return fuse.OK
}

func (f *fakeFS) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.open, in.Fh)
}

func (f *fakeFS) SetAttr(_ <-chan struct{}, _ *fuse.SetAttrIn, _ *fuse.AttrOut) fuse.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.open) == 0 {
		return fuse.EIO
	}
	return fuse.OK
}

func TestHandlesReleasesWhatTheKernelDidNot(t *testing.T) {
	fake := &fakeFS{RawFileSystem: fuse.NewDefaultRawFileSystem(), open: map[uint64]bool{}}
	h := newHandles(fake)
	var out fuse.OpenOut
	for range 3 {
		h.Open(nil, &fuse.OpenIn{}, &out)
	}
	h.Release(nil, &fuse.ReleaseIn{Fh: out.Fh})
	if n := h.releaseAll(); n != 2 || len(fake.open) != 0 {
		t.Errorf("released %d, left open %d, want 2 and 0", n, len(fake.open))
	}
	in := &fuse.SetAttrIn{} // to size 0: nothing to fetch
	in.Valid = fuse.FATTR_SIZE
	if status := h.SetAttr(nil, in, &fuse.AttrOut{}); !status.Ok() || len(fake.open) != 0 {
		t.Errorf("a size set by path: %v, with %d files left open; want it set with the file open, and closed", status, len(fake.open))
	}
}

// localRemote returns a directory that replaces S3.
func localRemote(t *testing.T, dir string) fs.Fs {
	t.Helper()
	remote, err := local.NewFs(t.Context(), "local", dir, configmap.Simple{})
	check(t, err)
	return remote
}

// A process that is killed right after close(2) has recorded only that the file is dirty.
func TestRepairTakesUpAllOfAChangedFile(t *testing.T) {
	c := newCache(config{bucket: "b", prefix: "p/", cacheDir: t.TempDir()})
	for _, d := range []string{c.data, c.meta} {
		check(t, os.MkdirAll(d, 0o700))
	}
	for name, meta := range map[string]string{
		"new": `{"Dirty":true}`, "older": `{"Dirty":true,"Size":7,"Fingerprint":"7,x","Rs":[{"Pos":0,"Size":7}]}`,
		"sparse": `{"Dirty":true,"Size":1}`, "without-data": `{"Dirty":true}`,
	} {
		check(t, os.WriteFile(filepath.Join(c.meta, name), []byte(meta), 0o600))
		if name != "without-data" {
			check(t, os.WriteFile(filepath.Join(c.data, name), payload(64<<10, 1), 0o600))
		}
	}
	check(t, os.Truncate(filepath.Join(c.data, "sparse"), 1<<20))
	for range 2 {
		check(t, c.repair(t.Context(), localRemote(t, t.TempDir())))
		for name, size := range map[string]int64{"new": 64 << 10, "older": 64 << 10, "sparse": 1 << 20} {
			info, err := readInfo(filepath.Join(c.meta, name))
			if err != nil || !info.Dirty || info.Size != size || !info.Rs.Present(ranges.Range{Size: size}) || info.Fingerprint != map[string]string{"older": "7,x"}[name] {
				t.Errorf("%s: %+v, %v", name, info, err)
			}
		}
	}
}

func TestRepairTakesUpWholeFilesAndPutsTornOnesAside(t *testing.T) {
	dir := t.TempDir()
	c := newCache(config{bucket: "b", prefix: "p/", cacheDir: dir})
	for _, d := range []string{c.data, c.meta} {
		check(t, os.MkdirAll(d, 0o700))
	}
	for name, meta := range map[string]string{"whole": "", "torn": "", "good": `{"Dirty":false}`, "empty": ""} {
		check(t, os.WriteFile(filepath.Join(c.meta, name), []byte(meta), 0o600))
		check(t, os.WriteFile(filepath.Join(c.data, name), payload(64<<10, 1), 0o600))
	}
	check(t, os.Truncate(filepath.Join(c.data, "torn"), 1<<20))
	check(t, os.Truncate(filepath.Join(c.data, "empty"), 0))
	check(t, os.WriteFile(filepath.Join(c.meta, "without-data"), nil, 0o600))
	check(t, c.repair(t.Context(), localRemote(t, t.TempDir())))
	left, err := c.unsent() // before rclone has seen the cache
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 2 || left["whole"] || left["empty"] {
		t.Errorf("unsent files %v, want whole and empty, with no version of them in S3", left)
	}
	for name := range left {
		if name != "whole" && name != "empty" {
			t.Errorf("%s is to be sent", name)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, lost, "torn")); err != nil {
		t.Errorf("the torn file was not put aside: %v", err)
	}
}

// away is an S3 service that does not respond.
type away struct{ fs.Fs }

func (away) NewObject(ctx context.Context, _ string) (fs.Object, error) {
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

// The comparison of files with their objects has one timeout for all files.
func TestRepairWaitsForS3Once(t *testing.T) {
	c := newCache(config{bucket: "b", prefix: "p/", cacheDir: t.TempDir(), readCache: true})
	for _, d := range []string{c.data, c.meta} {
		check(t, os.MkdirAll(d, 0o700))
		for i := range 10 {
			check(t, os.WriteFile(filepath.Join(d, strconv.Itoa(i)), nil, 0o600))
		}
	}
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		check(t, c.repair(t.Context(), away{}))
		if took := time.Since(began); took != compareBound {
			t.Errorf("it took %s, want %s", took, compareBound)
		}
	})
	if aside, err := os.ReadDir(c.lost); err != nil || len(aside) != 10 {
		t.Errorf("put aside: %v, %v", aside, err)
	}
}

// A file that was only read equals its object as far as it is cached, and is removed. A file that may have changed is quarantined.
func TestRepairForgetsWhatWasOnlyRead(t *testing.T) {
	const size = 64 << 10
	page := os.Getpagesize()
	content := payload(size, 1)
	part := func(from, to int) func(*os.File) error {
		return func(f *os.File) error {
			_, err := f.WriteAt(content[from:to], int64(from))
			return err
		}
	}
	other := func(at int64) func(*os.File) error {
		return func(f *os.File) error {
			_, err := f.WriteAt([]byte("written"), at)
			return err
		}
	}
	for name, c := range map[string]struct {
		size  int64
		has   []func(*os.File) error
		aside bool
	}{
		"whole":          {size: size, has: []func(*os.File) error{part(0, size)}},
		"nothing":        {size: size},
		"parts":          {size: size, has: []func(*os.File) error{part(page, page+100), part(3*page, size)}},
		"changed":        {size: size, has: []func(*os.File) error{part(0, size), other(100)}, aside: true},
		"zeros in whole": {size: size, has: []func(*os.File) error{part(0, size-10)}, aside: true},
		"changed part":   {size: size, has: []func(*os.File) error{part(page, 3*page), other(int64(2*page) - 7)}, aside: true},
		"longer":         {size: size + 1, has: []func(*os.File) error{part(0, page)}, aside: true},
		"shorter":        {size: int64(page), has: []func(*os.File) error{part(0, page)}, aside: true},
		"not in S3":      {size: size, aside: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir, bucket := t.TempDir(), t.TempDir()
			cache := newCache(config{bucket: "b", prefix: "p/", cacheDir: dir, readCache: true})
			for _, d := range []string{cache.data, cache.meta} {
				check(t, os.MkdirAll(d, 0o700))
			}
			if name != "not in S3" {
				check(t, os.WriteFile(filepath.Join(bucket, "file"), content, 0o600))
			}
			f, err := os.Create(filepath.Join(cache.data, "file"))
			check(t, err)
			defer f.Close()
			check(t, f.Truncate(c.size))
			for _, put := range c.has {
				check(t, put(f))
			}
			check(t, os.WriteFile(filepath.Join(cache.meta, "file"), nil, 0o600))
			check(t, cache.repair(t.Context(), localRemote(t, bucket)))
			if _, err := os.Stat(filepath.Join(cache.lost, "file")); (err == nil) != c.aside {
				t.Errorf("put aside: %t, want %t", err == nil, c.aside)
			}
			for _, left := range []string{filepath.Join(cache.data, "file"), filepath.Join(cache.meta, "file")} {
				if _, err := os.Lstat(left); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s is left: %v", left, err)
				}
			}
		})
	}
}
