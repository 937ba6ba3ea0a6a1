package fuseclients

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// Backend is a config file that has nothing but the backend "default".
func Backend(s3 rig.S3) string {
	return fmt.Sprintf("\nbackends:\n  default: {endpoint: %q, region: %q, addressing: path}\n", s3.Endpoint, s3.Region)
}

// DeclareRclone is a config file that declares Debian's rclone. Its command mount2 takes a FUSE descriptor (fuse: path), and mount executes
// fusermount. Without rclone's cache, close returns when a file is stored. More settings of the declaration can follow.
func DeclareRclone(s3 rig.S3, name, fuse, command string) string {
	return Backend(s3) + fmt.Sprintf(`
clients:
  %[1]s:
    program: %[1]s
    fuse: %[2]s
    args:
    - %[3]s
    - --allow-non-empty
    - --config=/dev/null
    - --s3-provider=Other
    - --s3-env-auth=true
    - --s3-no-check-bucket=true
    - --s3-endpoint=${endpoint}
    - --s3-region=${region}
    - --ca-cert=${caFile}
    - --uid=${uid}
    - --gid=${gid}
    - --dir-perms=${dirMode}
    - --file-perms=${fileMode}
    operands: [":s3:${bucket}/${prefix}", "${mountpoint}"]
    needs: [delete]
    memory: 128Mi
    drain: exits
    cache: none
    options:
      dir-cache-time: {type: duration, min: 1s, max: 1h}
      no-checksum: {type: flag}
`, name, fuse, command)
}

// DeclareS3fs is a config file that declares Debian's s3fs, whose close returns when a file is stored.
func DeclareS3fs(s3 rig.S3, name string) string {
	return Backend(s3) + fmt.Sprintf(`
clients:
  %[1]s:
    program: %[1]s
    fuse: fusermount
    credentials: static
    args: [-f, -oallow_other, -oauto_unmount, "-ourl=${endpoint}", "-oendpoint=${region}", "-ouid=${uid}", "-ogid=${gid}", -oumask=0000, "-otmpdir=${cacheDir}"]
    argsIf:
      pathStyle: [-ouse_path_request_style]
    operands: ["${bucket}:/${prefix}", "${mountpoint}"]
    needs: [delete]
    memory: 128Mi
    drain: exits
    cache: copies
    options:
      retries: {type: integer, min: "0", max: "10", argument: "-oretries=${value}"}
`, name)
}

// Declare installs a program of Debian under the name of its declaration, and writes the config file. It returns the driver's flag for it.
func Declare(t testing.TB, r *rig.Rig, program, name, config string) (flag string) {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("the program %s of Debian is missing: make setup installs it: %v", program, err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := rig.WriteProgram(filepath.Join(r.Clients, name), content); err != nil {
		t.Fatal(err)
	}
	return WriteConfig(t, r, config)
}

// WriteConfig writes the config file. It returns the driver's flag for it.
func WriteConfig(t testing.TB, r *rig.Rig, config string) (flag string) {
	t.Helper()
	file := filepath.Join(r.Dir, "config.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return "--config=" + file
}
