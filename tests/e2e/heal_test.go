//go:build !lane || shared

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// TestContainersHeal kills clients under running containers, which have mounts without propagation, as all have by default.
func TestContainersHeal(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	for client := range rig.Programs() {
		t.Run(client, func(t *testing.T) {
			p := newPatient(t, ns, strings.ReplaceAll(client, "-", ""), client, class(t, map[string]string{"bucketName": b, "client": client}))
			// Another pod with the volume shares its mount, and is well with it.
			other := podSpec{name: p.name + "-other", claims: map[string]string{"/v": p.name}}
			other.run(t, ns)
			p.die(t)
			eventually(t, "the other pod to be well again", func() error { // its turn comes later
				got, err := tryExecute(ns, other.name, "cat", "/v/file")
				if err == nil && got != "of the volume" {
					err = fmt.Errorf("it reads %q", got)
				}
				return err
			})
			remove(t, "pod", ns, p.name)
			remove(t, "pod", ns, other.name)
			p.mount.gone(t)
		})
	}
}

// TestContainersWithHostToContainer starts containers whose mounts of a volume have that propagation, and kills their clients.
func TestContainersWithHostToContainer(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	for client := range rig.Programs() {
		t.Run(client, func(t *testing.T) {
			name := strings.ReplaceAll(client, "-", "")
			p := newPatientWith(t, ns, name, client, class(t, map[string]string{"bucketName": b, "client": client}), "HostToContainer")
			p.die(t)
			p.die(t)
			remove(t, "pod", ns, p.name)
			p.mount.gone(t)
		})
	}
}
