package client

import (
	"maps"
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

// What the table advises to write can be written.
func TestTheAdviceNamesOptionsThatThereAre(t *testing.T) {
	named := regexp.MustCompile(`mount option ([a-z-]+)(?: of (rclone|mountpoint-s3))?(?: or ([a-z-]+) of mountpoint-s3)?`)
	found := 0
	for _, row := range volume.ForeignDocs() {
		for _, m := range named.FindAllStringSubmatch(row.Here, -1) {
			if row.Origin == volume.OriginK8sS3 || m[1] == "client" {
				continue
			}
			found++
			clients := []string{m[2]}
			switch {
			case row.Origin == volume.OriginRclone:
				clients = []string{"rclone"}
			case m[2] == "":
				clients = []string{"rclone", "mountpoint-s3"}
			}
			for _, name := range clients {
				if _, ok := get(t, name).Options[m[1]]; !ok {
					t.Errorf("%s %s: %s has no option %s", row.Origin, row.Name, name, m[1])
				}
			}
			if _, ok := get(t, "mountpoint-s3").Options[m[3]]; m[3] != "" && !ok {
				t.Errorf("%s %s: mountpoint-s3 has no option %s", row.Origin, row.Name, m[3])
			}
		}
		if row.Origin == volume.OriginGeeseFS && row.Name == "memory-limit" {
			for _, c := range All() {
				if least := c.Name + " needs " + volume.FormatQuantity(c.MinMemory); !strings.Contains(row.Here, least) {
					t.Errorf("%s %s does not say %q", row.Origin, row.Name, least)
				}
			}
		}
	}
	if found < 20 {
		t.Errorf("%d options are named: the rest is not looked at", found)
	}
}

// The options of rclone that volumes of k8s-csi-s3 have become options that the client takes.
func TestOptionsOfRcloneAreTakenOver(t *testing.T) {
	for _, options := range []string{
		"--dir-cache-time 5m0s --vfs-write-back 5s --transfers 8 --vfs-cache-mode full --vfs-cache-max-size 10G --vfs-read-ahead 128M --s3-chunk-size 16M --use-server-modtime --s3-directory-markers",
		"--s3-storage-class STANDARD_IA --s3-server-side-encryption aws:kms --s3-sse-kms-key-id arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab",
	} {
		p, err := volume.ParseParameters(map[string]string{"bucket": "shared", "mounter": "rclone", "options": options}, "v")
		if err != nil {
			t.Fatal(err)
		}
		if err := get(t, "rclone").Check(p.Node.MountOptions, "mountOptions"); err != nil {
			t.Error(err)
		}
	}
}
