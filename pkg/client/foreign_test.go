package client

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// What the table of other drivers' words calls an option of Mountpoint is one, and every option of Mountpoint is in the table.
func TestPassedOptionsOfTheAWSDriverAreMountpoints(t *testing.T) {
	own := get(t, "mountpoint-s3").Options
	left := maps.Clone(own)
	delete(left, "rename") // is not one of mount-s3
	for _, row := range volume.ForeignDocs() {
		if row.Origin != volume.OriginAWSOption {
			continue
		}
		_, ok := own[row.Name]
		if passed := row.Outcome == volume.Passed; ok != passed && row.Name != "max-cache-size" { // which is one only without a cache
			t.Errorf("%s is %s, and an option of Mountpoint here: %t", row.Name, row.Outcome, ok)
		}
		delete(left, row.Name)
	}
	if len(left) > 0 {
		t.Errorf("not in the table: %v", slices.Sorted(maps.Keys(left)))
	}
}

// Every mount option that the page on settings of other drivers advises to use exists.
func TestTheAdviceNamesExistingOptions(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/migrating-settings.md")
	must(t, err)
	named := regexp.MustCompile(`mount options? ([a-z-]+(?:, [a-z-]+)*)(?: of (rclone|mountpoint-s3))?(?: or ([a-z-]+) of mountpoint-s3)?`)
	found, limits := 0, false
	var section string
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "#") {
			section = line
		}
		if !strings.HasPrefix(line, "| `") || strings.HasPrefix(line, "| `mounter`") {
			continue
		}
		for _, m := range named.FindAllStringSubmatch(line, -1) {
			clients := []string{m[2]}
			switch {
			case strings.Contains(section, "rclone"):
				clients = []string{"rclone"}
			case m[2] == "":
				clients = []string{"rclone", "mountpoint-s3"}
			}
			for option := range strings.SplitSeq(m[1], ", ") {
				found++
				for _, name := range clients {
					if _, ok := get(t, name).Options[option]; !ok {
						t.Errorf("%s has no option %s: %s", name, option, line)
					}
				}
			}
			if _, ok := get(t, "mountpoint-s3").Options[m[3]]; m[3] != "" && !ok {
				t.Errorf("mountpoint-s3 has no option %s: %s", m[3], line)
			}
		}
		if strings.HasPrefix(line, "| `memory-limit` ") {
			limits = true
			for _, c := range All() {
				if least := c.Name + " needs " + volume.FormatQuantity(c.MinMemory); !strings.Contains(line, least) {
					t.Errorf("%q is not in %s", least, line)
				}
			}
		}
	}
	if found < 20 || !limits {
		t.Errorf("%d options are named, memory limits %t: the rest is not checked", found, limits)
	}
}

// The options of rclone that volumes of k8s-csi-s3 have become options that the client takes.
func TestOptionsOfRcloneAreTakenOver(t *testing.T) {
	for _, options := range []string{
		"--dir-cache-time 5m0s --vfs-write-back 5s --transfers 8 --vfs-cache-mode full --vfs-cache-max-size 10G " +
			"--vfs-read-ahead 128M --s3-chunk-size 16M --use-server-modtime --s3-directory-markers",
		"--s3-storage-class STANDARD_IA --s3-server-side-encryption aws:kms " +
			"--s3-sse-kms-key-id arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab",
	} {
		p, err := volume.ParseParameters(map[string]string{"bucket": "shared", "mounter": "rclone", "options": options}, "v")
		must(t, err)
		if err := get(t, "rclone").Check(p.Node.MountOptions, "mountOptions"); err != nil {
			t.Error(err)
		}
	}
}
