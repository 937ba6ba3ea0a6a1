//go:build !lane || disrupt

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// agent is a pod that has the node's root, with all that is mounted there when it starts.
func agent(t testing.TB, ns, name, propagation string) {
	t.Helper()
	apply(t, ns, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: %s, command: [sleep, "1000000"], volumeMounts: [{name: host, mountPath: /host, mountPropagation: %s}]}]
  volumes: [{name: host, hostPath: {path: /}}]`, name, cluster.Busybox, propagation))
	podReady(t, ns, name)
}

// TestAgentsWithTheNodesRoot sees that pods with copies of the node's mounts keep no client alive, and do not keep stale mounts.
func TestAgentsWithTheNodesRoot(t *testing.T) {
	ns := newNamespace(t)
	b := bucket(t)
	agents := map[string]string{"private": "None", "slave": "HostToContainer"}
	var patients []*patient
	for client := range rig.Programs() {
		c := class(t, map[string]string{"bucketName": b, "client": client})
		for _, fate := range []string{"ends", "dies"} {
			patients = append(patients, newPatient(t, ns, strings.ReplaceAll(client, "-", "")+"-"+fate, client, c))
		}
	}
	for name, propagation := range agents {
		agent(t, ns, name, propagation)
		for _, p := range patients {
			if len(p.mount.of(containerTable(t, ns, name))) < 2 { // the source and the target
				t.Fatalf("agent %s has no copy of %s's mount: the test is worth nothing", name, p.name)
			}
		}
	}
	gone := func(t *testing.T, p *patient) {
		t.Helper()
		remove(t, "pod", ns, p.name)
		eventually(t, "the mount of "+p.name+" to be gone everywhere", func() error {
			if all := p.mount.processes(); len(all) > 0 {
				return fmt.Errorf("there are %v", all)
			}
			for name := range agents {
				if left := p.mount.of(containerTable(t, ns, name)); len(left) > 0 {
					return fmt.Errorf("agent %s has %s", name, left[0].Mountpoint)
				}
			}
			return nil
		})
	}
	for _, p := range patients {
		t.Run(p.name, func(t *testing.T) {
			if strings.HasSuffix(p.name, "-dies") {
				p.die(t)
				device := p.mount.device(t)
				eventually(t, "the agents to have no dead mounts", func() error {
					for name := range agents {
						for _, m := range p.mount.of(containerTable(t, ns, name)) {
							if deviceOf(m) != device {
								return fmt.Errorf("agent %s has %s of device %s, the healthy one is %s", name, m.Mountpoint, deviceOf(m), device)
							}
						}
					}
					if len(p.mount.of(containerTable(t, ns, "slave"))) == 0 {
						return errors.New("agent slave does not have the healthy mount")
					}
					return nil
				})
			}
			gone(t, p)
		})
	}
	for name := range agents {
		remove(t, "pod", ns, name)
	}
	nothingLeft(t)
}

// TestTokensOfServiceAccounts: they come among the secrets or in the volume context, as the cluster supports, and appear nowhere else.
func TestTokensOfServiceAccounts(t *testing.T) {
	ns := newNamespace(t)
	apply(t, ns, account("app"))
	workloadRole(t, ns, "app", everything, "app")
	b := bucket(t)
	claim(t, ns, "data", class(t, map[string]string{"bucketName": b, "credentials": "workload", "roleARN": roleOfWorkload, "scope": "required"}), "ReadWriteMany")
	v := bound(t, ns, "data")
	inSecrets := func() string {
		return strings.TrimSpace(kubectl(t, "get", "csidriver", csiName, "-o", "jsonpath={.spec.serviceAccountTokenInSecrets}"))
	}
	if inSecrets() != "true" {
		t.Fatalf("serviceAccountTokenInSecrets is %q in this cluster", inSecrets())
	}
	t.Cleanup(func() { deploy(t) })
	for _, where := range []struct{ name, inSecrets string }{{"secrets", "true"}, {"context", "false"}} {
		t.Run(where.name, func(t *testing.T) {
			deploy(t, "logging.level=5", "csiDriver.serviceAccountTokenInSecrets="+where.inSecrets)
			if got := inSecrets(); got != where.inSecrets && (got != "" || where.inSecrets != "false") {
				t.Fatalf("serviceAccountTokenInSecrets is %q", got)
			}
			podSpec{name: where.name, claims: map[string]string{"/v": "data"}, pod: "serviceAccountName: app",
				command: "echo x >/v/" + where.name + " && " + forever}.run(t, ns)
			session := sessionOf(t, v).keys
			requests := ""
			eventually(t, "a publication to be logged that has the token where it is now", func() error {
				requests = ""
				for line := range strings.Lines(driverLog(t, 100000)) {
					if strings.Contains(line, "NodePublishVolume") && strings.Contains(line, v.Spec.CSI.VolumeHandle) {
						requests += line
					}
				}
				if strings.Contains(requests, "serviceAccount.tokens") != (where.inSecrets == "false") {
					return fmt.Errorf("there are %s", requests)
				}
				return nil
			})
			log := driverLog(t, 100000)
			if found := regexp.MustCompile(`eyJ[\w-]{8,}\.[\w-]+`).FindString(log); found != "" {
				t.Errorf("the driver's log holds a token: %.20s…", found)
			}
			for what, text := range map[string]string{"secret key": session.SecretAccessKey, "token": session.SessionToken} {
				if strings.Contains(log, text) {
					t.Errorf("the driver's log holds a session's %s", what)
				}
			}
			remove(t, "pod", ns, where.name)
		})
	}
	_, prefix := place(t, v)
	if all := keys(t, b, prefix); !slices.Equal(all, []string{prefix + "context", prefix + "secrets"}) {
		t.Errorf("S3 has %q", all)
	}
}

// TestManyPodsAtOnce starts fifty pods at the same moment, each with a claim and a mount of its own, and ends them at the same moment.
func TestManyPodsAtOnce(t *testing.T) {
	ns := newNamespace(t)
	b := bucket(t)
	clients := slices.Sorted(maps.Keys(rig.Programs()))
	total := eachMany * len(clients)
	manyReady(t, ns, b, clients)
	if n := len(mountRecords(t)); n != total {
		t.Errorf("the node has %d mounts", n)
	}
	for _, p := range list(t, "pods", ns) {
		podReady(t, ns, p.Metadata.Name)
	}
	endAll(t, ns)
	for _, client := range clients {
		var names []string
		for _, key := range keys(t, b, client+"/") {
			names = append(names, strings.TrimSuffix(content(t, b, key), "\n"))
		}
		slices.Sort(names)
		var want []string
		for i := range eachMany {
			want = append(want, fmt.Sprintf("%s-%d", setOf(client), i))
		}
		slices.Sort(want)
		if !slices.Equal(names, want) {
			t.Errorf("%s: S3 has what the pods %q wrote, want %q", client, names, want)
		}
	}
	nothingLeft(t)
}
