package podvolume

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestParseAttributes(t *testing.T) {
	for name, tc := range map[string]struct {
		context map[string]string
		field   string // of the error; "": none
	}{
		"both":                {map[string]string{AttributeEmptyDir: "fuse-fd-passing", AttributeSocket: "fuse-csi-ephemeral.sock"}, ""},
		"kubelet's":           {map[string]string{AttributeEmptyDir: "a", AttributeSocket: "s", "csi.storage.k8s.io/pod.uid": "x"}, ""},
		"longest":             {map[string]string{AttributeEmptyDir: strings.Repeat("a", 63), AttributeSocket: strings.Repeat("s", 64)}, ""},
		"no socket":           {map[string]string{AttributeEmptyDir: "a"}, AttributeSocket},
		"no directory":        {map[string]string{AttributeSocket: "s"}, AttributeEmptyDir},
		"bucket":              {map[string]string{AttributeEmptyDir: "a", AttributeSocket: "s", "bucketName": "b"}, "bucketName"},
		"misspelt":            {map[string]string{AttributeEmptyDir: "a", AttributeSocket: "s", "fdPassingSocketname": "t"}, "fdPassingSocketname"},
		"directory above":     {map[string]string{AttributeEmptyDir: "..", AttributeSocket: "s"}, AttributeEmptyDir},
		"directory path":      {map[string]string{AttributeEmptyDir: "a/b", AttributeSocket: "s"}, AttributeEmptyDir},
		"upper case":          {map[string]string{AttributeEmptyDir: "A", AttributeSocket: "s"}, AttributeEmptyDir},
		"dash at the end":     {map[string]string{AttributeEmptyDir: "a-", AttributeSocket: "s"}, AttributeEmptyDir},
		"directory too long":  {map[string]string{AttributeEmptyDir: strings.Repeat("a", 64), AttributeSocket: "s"}, AttributeEmptyDir},
		"socket above":        {map[string]string{AttributeEmptyDir: "a", AttributeSocket: ".."}, AttributeSocket},
		"hidden socket":       {map[string]string{AttributeEmptyDir: "a", AttributeSocket: ".s"}, AttributeSocket},
		"socket path":         {map[string]string{AttributeEmptyDir: "a", AttributeSocket: "a/s"}, AttributeSocket},
		"socket with NUL":     {map[string]string{AttributeEmptyDir: "a", AttributeSocket: "s\x00"}, AttributeSocket},
		"socket with newline": {map[string]string{AttributeEmptyDir: "a", AttributeSocket: "s\n"}, AttributeSocket},
		"socket too long":     {map[string]string{AttributeEmptyDir: "a", AttributeSocket: strings.Repeat("s", 65)}, AttributeSocket},
	} {
		dir, socket, err := ParseAttributes(tc.context)
		if tc.field == "" {
			if err != nil || dir != tc.context[AttributeEmptyDir] || socket != tc.context[AttributeSocket] {
				t.Errorf("%s: %q, %q, %v", name, dir, socket, err)
			}
			continue
		}
		if f := (*fault.Error)(nil); !errors.As(err, &f) || f.Kind != fault.Invalid || f.Field != "volume_context."+tc.field {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRequested(t *testing.T) {
	for key, want := range map[string]bool{AttributeEmptyDir: true, AttributeSocket: true, "fdPassingSocketname": true, "bucketName": false} {
		if got := Requested(map[string]string{key: "x"}); got != want {
			t.Errorf("%s: %t", key, got)
		}
	}
}

// Whatever the pod's author writes, the socket is a file directly in a directory of the pod's emptyDir volumes.
func FuzzParseAttributes(f *testing.F) {
	f.Add("fuse-fd-passing", "fuse.sock")
	f.Add("..", "../../x")
	f.Add("a\n", "s\n")
	f.Fuzz(func(t *testing.T, emptyDir, socket string) {
		v := Volume{Target: "/k/pods/0b9c7f1e-53a4/volumes/kubernetes.io~csi/v/mount"}
		var err error
		v.EmptyDir, v.Socket, err = ParseAttributes(map[string]string{AttributeEmptyDir: emptyDir, AttributeSocket: socket})
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		dir := filepath.Dir(filepath.Join(v.SocketDir(), v.Socket))
		if filepath.Dir(dir) != "/k/pods/0b9c7f1e-53a4/volumes/kubernetes.io~empty-dir" || strings.ContainsAny(dir+socket, "\x00\n") {
			t.Fatalf("%q", filepath.Join(v.SocketDir(), v.Socket))
		}
	})
}

func TestPodOfATarget(t *testing.T) {
	for target, want := range map[string]string{
		"/var/lib/kubelet/pods/0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611/volumes/kubernetes.io~csi/v/mount": "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611",
		"/k/pods/0b9c7f1e/volumes/kubernetes.io~csi/v/mount/x":                                         "",
		"/k/pods/0b9c7f1e/volumes/kubernetes.io~nfs/v/mount":                                           "",
		"/k/pods/../volumes/kubernetes.io~csi/v/mount":                                                 "",
		"/alloc/x": "",
	} {
		if _, uid, ok := (Volume{Target: target}).Pod(); uid != want || ok != (want != "") {
			t.Errorf("%s: %q, %t", target, uid, ok)
		}
	}
}
