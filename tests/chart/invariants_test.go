package chart

import (
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Properties of the rendered objects that hold for all values.
func TestChart_GrantsOnlyWhatIsNeeded(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		if len(workloads(objects)) == 0 {
			t.Fatal("nothing runs")
		}
		for _, o := range workloads(objects) {
			spec := o.Spec.Template.Spec
			if len(spec.InitContainers) > 0 {
				t.Errorf("%s has init containers, which this test does not look at", o.Metadata.Name)
			}
			if spec.Automount == nil || *spec.Automount {
				t.Errorf("%s: every container gets a token for the API server", o.Metadata.Name)
			}
			node := o.Kind == "DaemonSet"
			if spec.HostPID != node {
				t.Errorf("%s: hostPID is %v", o.Metadata.Name, spec.HostPID)
			}
			if !node && (!spec.SecurityContext.RunAsNonRoot || spec.SecurityContext.RunAsUser == 0) {
				t.Errorf("%s runs as root", o.Metadata.Name)
			}
			if spec.SecurityContext.SeccompProfile.Type != "RuntimeDefault" {
				t.Errorf("%s has no seccomp profile", o.Metadata.Name)
			}
			checkHostPaths(t, o, objects)
			for _, c := range spec.Containers {
				checkContainer(t, o, c)
			}
		}
	})
}

// checkHostPaths allows two host directories for the node's pods, and none for others.
func checkHostPaths(t *testing.T, o object, objects []object) {
	t.Helper()
	var have []string
	for _, v := range o.Spec.Template.Spec.Volumes {
		if v.HostPath != nil {
			have = append(have, v.HostPath.Path+" "+v.HostPath.Type)
		}
	}
	var want []string
	if o.Kind == "DaemonSet" {
		driver := driverOf(t, o).flag("driver-name")
		registered := containerOf(t, o, "node-driver-registrar").flag("kubelet-registration-path")
		kubelet := strings.TrimSuffix(registered, "/plugins/"+driver+"/csi.sock")
		if kubelet == registered {
			t.Fatalf("the registrar gives kubelet %s, which is not the socket of %s", registered, driver)
		}
		want = []string{kubelet + "/plugins/" + driver + "/ DirectoryOrCreate", kubelet + "/plugins_registry/ Directory"}
		for _, csi := range of(objects, "CSIDriver") {
			if csi.Metadata.Name != driver {
				t.Errorf("the CSIDriver object is %s, the driver %s", csi.Metadata.Name, driver)
			}
		}
	}
	if !slices.Equal(have, want) {
		t.Errorf("%s mounts %q of the host, want %q", o.Metadata.Name, have, want)
	}
}

func checkContainer(t *testing.T, o object, c container) {
	t.Helper()
	place := o.Metadata.Name + "/" + c.Name
	s := c.SecurityContext
	if privileged := o.Kind == "DaemonSet" && c.Name == "s3-csi-driver"; s.Privileged != privileged {
		t.Errorf("%s: privileged is %v", place, s.Privileged)
	} else if !privileged {
		if !slices.Equal(s.Capabilities.Drop, []string{"ALL"}) || len(s.Capabilities.Add) > 0 {
			t.Errorf("%s has capabilities: %+v", place, s.Capabilities)
		}
		if s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation {
			t.Errorf("%s may gain privileges", place)
		}
	}
	if !s.ReadOnlyRootFilesystem {
		t.Errorf("%s may write to its image", place)
	}
	for _, m := range c.VolumeMounts {
		if m.MountPropagation != "" && m.MountPropagation != "None" {
			t.Errorf("%s: %s has propagation %s", place, m.MountPath, m.MountPropagation)
		}
		if m.SubPath != "" {
			t.Errorf("%s: %s is a subPath, which no change reaches", place, m.MountPath)
		}
		if token := m.MountPath == "/var/run/secrets/kubernetes.io/serviceaccount"; token &&
			!slices.Contains([]string{"csi-provisioner", "csi-resizer", "csi-snapshotter"}, c.Name) {
			t.Errorf("%s has a token for the API server", place)
		}
	}
	name, tag, ok := strings.Cut(c.Image[strings.LastIndex(c.Image, "/")+1:], ":")
	if !ok || name == "" || tag == "" || tag == "latest" {
		t.Errorf("%s: the image %q has no version", place, c.Image)
	}
}

func TestServiceAccountsHaveTheirRightsAndNoOthers(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		accounts := map[string]string{} // name → kind of its pods
		for _, o := range workloads(objects) {
			accounts[o.Spec.Template.Spec.ServiceAccountName] = o.Kind
		}
		for _, o := range of(objects, "ServiceAccount") {
			if accounts[o.Metadata.Name] == "" {
				t.Errorf("no pod uses the service account %s", o.Metadata.Name)
			}
			if o.Automount == nil || *o.Automount {
				t.Errorf("the token of service account %s is mounted", o.Metadata.Name)
			}
		}
		for _, binding := range append(of(objects, "ClusterRoleBinding"), of(objects, "RoleBinding")...) {
			for _, s := range binding.Subjects {
				if binding.RoleRef.Name == "system:openshift:scc:privileged" && accounts[s.Name] == "DaemonSet" && s.Kind == "ServiceAccount" && s.Namespace == namespace {
					continue // it allows pods, and no request to the API server
				}
				if s.Kind != "ServiceAccount" || accounts[s.Name] != "Deployment" || s.Namespace != namespace {
					t.Errorf("%s %s gives rights to %+v", binding.Kind, binding.Metadata.Name, s)
				}
			}
		}
		for _, role := range append(of(objects, "ClusterRole"), of(objects, "Role")...) {
			for _, r := range role.Rules {
				for _, word := range slices.Concat(r.APIGroups, r.Resources, r.Verbs) {
					if strings.Contains(word, "*") {
						t.Errorf("%s %s has a wildcard: %+v", role.Kind, role.Metadata.Name, r)
					}
				}
			}
		}
	})
}

// rights returns the rules of all roles of a kind, as "place: groups/resources[names] verbs", sorted.
func rights(objects []object, kind string) []string {
	var list []string
	for _, role := range of(objects, kind) {
		for _, r := range role.Rules {
			place := role.Metadata.Namespace
			if place == "" {
				place = "cluster"
			}
			list = append(list, fmt.Sprintf("%s: %s/%s%v %s", place, strings.Join(r.APIGroups, ","), strings.Join(r.Resources, ","), r.ResourceNames,
				strings.Join(r.Verbs, ",")))
		}
	}
	slices.Sort(list)
	return list
}

func TestRightsOfTheResizer(t *testing.T) {
	without := template(t)
	with := template(t, "--set", "sidecars.resizer.enabled=true", "--set", "driverName=my.s3.driver")
	if have, want := len(rights(without, "ClusterRole")), 4; have != want {
		t.Errorf("without it there are %d rules, want %d", have, want)
	}
	for kind, want := range map[string][]string{
		"ClusterRole": {
			"cluster: /events[] create,patch",
			"cluster: /persistentvolumeclaims/status[] patch",
			"cluster: /persistentvolumeclaims[] get,list,watch",
			"cluster: /persistentvolumes[] get,list,watch,patch",
			"cluster: storage.k8s.io/volumeattributesclasses[] get,list,watch",
		},
		"Role": {"s3-csi: coordination.k8s.io/leases[] create", "s3-csi: coordination.k8s.io/leases[external-resizer-my-s3-driver] get,update"},
	} {
		var have []object
		for _, o := range of(with, kind) {
			if strings.HasSuffix(o.Metadata.Name, "-resizer") {
				have = append(have, o)
			}
		}
		if got := rights(have, kind); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", kind, got, want)
		}
		if roles, bindings := len(of(with, kind)), len(of(with, kind+"Binding")); roles != 2 || bindings != 2 {
			t.Errorf("%d %ss with %d bindings", roles, kind, bindings)
		}
	}
}

func TestRightsOfTheSnapshotter(t *testing.T) {
	with := template(t, "--set", "snapshots.enabled=true", "--set", "driverName=my.s3.driver")
	for kind, want := range map[string][]string{
		"ClusterRole": {
			"cluster: /events[] create,patch,update",
			"cluster: snapshot.storage.k8s.io/volumesnapshotclasses[] get,list,watch",
			"cluster: snapshot.storage.k8s.io/volumesnapshotcontents/status[] update,patch",
			"cluster: snapshot.storage.k8s.io/volumesnapshotcontents[] get,list,watch,update,patch",
			"cluster: snapshot.storage.k8s.io/volumesnapshots[] get,list,watch,update",
		},
		"Role": {"s3-csi: coordination.k8s.io/leases[] create", "s3-csi: coordination.k8s.io/leases[external-snapshotter-leader-my-s3-driver] get,update"},
	} {
		var have []object
		for _, o := range of(with, kind) {
			if strings.HasSuffix(o.Metadata.Name, "-snapshotter") {
				have = append(have, o)
			}
		}
		if got := rights(have, kind); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", kind, got, want)
		}
		if roles, bindings := len(of(with, kind)), len(of(with, kind+"Binding")); roles != 2 || bindings != 2 {
			t.Errorf("%d %ss with %d bindings", roles, kind, bindings)
		}
	}
	secret := template(t, withValues(t, "snapshots: {enabled: true}\nvolumeSnapshotClasses: [{name: a, parameters: "+
		"{csi.storage.k8s.io/snapshotter-secret-name: x}}]")...)
	if !slices.Contains(rights(secret, "ClusterRole"), "cluster: /secrets[] get") || slices.Contains(rights(with, "ClusterRole"), "cluster: /secrets[] get") {
		t.Error("secrets are not read exactly if a class names one")
	}
	classes := of(template(t, "--values", values("snapshotter")), "VolumeSnapshotClass")
	if len(classes) != 2 || classes[0].Parameters["consistency"] != "time" ||
		classes[0].Metadata.Annotations["snapshot.storage.kubernetes.io/is-default-class"] != "true" {
		t.Errorf("%+v", classes)
	}
}

// Classes allow expansion if there is a resizer, unless they say otherwise.
func TestClassesForTheResizer(t *testing.T) {
	expandable := func(objects []object) (names []string) {
		for _, o := range of(objects, "StorageClass") {
			if o.Expandable {
				names = append(names, o.Metadata.Name)
			}
		}
		return names
	}
	if got := expandable(template(t, "--values", values("resizer"))); !slices.Equal(got, []string{"s3"}) {
		t.Errorf("with a resizer: %q", got)
	}
	const classes = "storageClasses: [{name: a}, {name: b, allowVolumeExpansion: true}]"
	if got := expandable(template(t, withValues(t, classes)...)); !slices.Equal(got, []string{"b"}) {
		t.Errorf("without: %q", got)
	}
	attributes := of(template(t, "--values", values("resizer")), "VolumeAttributesClass")
	if len(attributes) != 1 || attributes[0].DriverName != "s3.csi.driver" || attributes[0].Parameters["onDelete"] != "retain" {
		t.Errorf("%+v", attributes)
	}
}

func TestRightsOfTheProvisioner(t *testing.T) {
	cluster := []string{
		"cluster: /events[] create,patch",
		"cluster: /persistentvolumeclaims[] get,list,watch",
		"cluster: /persistentvolumes[] get,list,watch,create,patch,delete",
		"cluster: storage.k8s.io/storageclasses[] get,list,watch",
	}
	lease := []string{"s3-csi: coordination.k8s.io/leases[] create", "s3-csi: coordination.k8s.io/leases[s3-csi-driver] get,update"}
	secrets := []string{"cluster: /secrets[] get"}
	class := "storageClasses: [{name: a, parameters: {csi.storage.k8s.io/provisioner-secret-name: x}}]\n"
	for name, c := range map[string]struct {
		values        string
		cluster, role []string
	}{
		"by default":            {"", cluster, lease},
		"a class with a secret": {class, append(secrets, cluster...), lease},
		"a class with one for the resizer": {"storageClasses: [{name: a, parameters: {csi.storage.k8s.io/controller-expand-secret-name: x}}]\n",
			append(secrets, cluster...), lease},
		"clones":              {"clones: {enabled: true}", []string{cluster[0], cluster[1] + ",update", cluster[2], cluster[3]}, lease},
		"a class without one": {"storageClasses: [{name: a, parameters: {bucketName: b}}]", cluster, lease},
		"asked for":           {"rbac: {secrets: true}", append(secrets, cluster...), lease},
		"namespaces": {"rbac: {secrets: true, secretNamespaces: [b, a]}", cluster,
			append([]string{"a: /secrets[] get", "b: /secrets[] get"}, lease...)},
		"namespaces for a class": {class + "rbac: {secretNamespaces: [a]}", cluster, append([]string{"a: /secrets[] get"}, lease...)},
		"nothing":                {"rbac: {create: false, secrets: true, secretNamespaces: [a]}", nil, nil},
		"a lease with the name of the driver": {"driverName: my.s3.driver", cluster,
			[]string{lease[0], "s3-csi: coordination.k8s.io/leases[my-s3-driver] get,update"}},
	} {
		t.Run(name, func(t *testing.T) {
			objects := template(t, withValues(t, c.values)...)
			slices.Sort(c.cluster)
			slices.Sort(c.role)
			if have := rights(objects, "ClusterRole"); !slices.Equal(have, c.cluster) {
				t.Errorf("in the cluster: %q, want %q", have, c.cluster)
			}
			if have := rights(objects, "Role"); !slices.Equal(have, c.role) {
				t.Errorf("in namespaces: %q, want %q", have, c.role)
			}
			for _, kind := range []string{"ClusterRole", "Role"} {
				if roles, bindings := len(of(objects, kind)), len(of(objects, kind+"Binding")); roles != bindings {
					t.Errorf("%d %ss with %d bindings", roles, kind, bindings)
				}
			}
		})
	}
}

// Secrets are rendered only into Secret objects.
func TestSecretsAreNowhereElse(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		for _, o := range objects {
			text, err := json.Marshal(o.raw)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(strings.ToLower(string(text)), "canary") != (o.Kind == "Secret") {
				t.Errorf("%s %s: a Secret without the canary, or something else with it", o.Kind, o.Metadata.Name)
			}
		}
		for _, o := range workloads(objects) {
			for _, c := range o.Spec.Template.Spec.Containers {
				for _, e := range c.Env {
					if strings.HasPrefix(e.Name, "AWS_SECRET") && e.Value != "" {
						t.Errorf("%s has a secret in its environment's text", o.Metadata.Name)
					}
				}
			}
		}
	})
	if len(of(template(t, "--values", values("full")), "Secret")) != 1 {
		t.Error("the variant full has no Secret with the canary")
	}
}

func TestPortsAreUniqueOnTheHostNetwork(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		onHost := map[int]string{}
		for _, o := range workloads(objects) {
			spec := o.Spec.Template.Spec
			seen := onHost
			if !spec.HostNetwork {
				seen = map[int]string{}
			}
			declared := map[int]bool{}
			for _, c := range spec.Containers {
				for _, p := range c.Ports {
					declared[p.ContainerPort] = true
				}
			}
			for _, c := range spec.Containers {
				address := c.flag("http-endpoint")
				if address == "" {
					continue
				}
				host, text, err := net.SplitHostPort(address)
				if err != nil {
					t.Fatal(err)
				}
				port, err := net.LookupPort("tcp", text)
				if err != nil {
					t.Fatal(err)
				}
				if seen[port] != "" {
					t.Errorf("port %d is of %s/%s and of %s", port, o.Metadata.Name, c.Name, seen[port])
				}
				seen[port] = o.Metadata.Name + "/" + c.Name
				if !declared[port] {
					t.Errorf("port %d of %s/%s is not declared, and the scheduler does not see it taken", port, o.Metadata.Name, c.Name)
				}
				open := len(of(objects, "Service")) > 0 && slices.Contains([]string{"s3-csi-driver", "csi-provisioner", "csi-resizer", "csi-snapshotter"}, c.Name)
				if want := spec.HostNetwork && !open; (host == "127.0.0.1") != want || (host != "" && host != "127.0.0.1") {
					t.Errorf("%s/%s listens on %q, with hostNetwork %v and metrics open %v", o.Metadata.Name, c.Name, address, spec.HostNetwork, open)
				}
			}
			if len(seen) < 2 {
				t.Errorf("%s has %d endpoints", o.Metadata.Name, len(seen))
			}
		}
	})
}

// Probes use a port of the container, and the address that it listens on.
func TestProbes_UsePortsThatAreServed(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		for _, o := range workloads(objects) {
			listening := map[int]string{} // port → host
			for _, c := range o.Spec.Template.Spec.Containers {
				if host, port, err := net.SplitHostPort(c.flag("http-endpoint")); err == nil {
					n, err := net.LookupPort("tcp", port)
					if err != nil {
						t.Fatal(err)
					}
					listening[n] = host
				}
			}
			probes := 0
			for _, c := range o.Spec.Template.Spec.Containers {
				ports := map[string]int{}
				for _, p := range c.Ports {
					ports[p.Name] = p.ContainerPort
				}
				for _, p := range []*probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
					if p == nil {
						continue
					}
					probes++
					name, _ := p.HTTPGet.Port.(string)
					host, ok := listening[ports[name]]
					if !ok || host != p.HTTPGet.Host {
						t.Errorf("%s/%s: the probe asks %q port %v, and there listens %q (%v)", o.Metadata.Name, c.Name, p.HTTPGet.Host, p.HTTPGet.Port, host, ok)
					}
				}
			}
			if probes < 3 {
				t.Errorf("%s has %d probes", o.Metadata.Name, probes)
			}
			driver := driverOf(t, o)
			if driver.ReadinessProbe == nil || driver.ReadinessProbe.HTTPGet.Path != "/readyz" || driver.ReadinessProbe.HTTPGet.Port != "driver" {
				t.Errorf("%s: readiness is not the driver's own /readyz", o.Metadata.Name)
			}
			timeout, err := time.ParseDuration(driver.flag("shutdown-timeout"))
			if err != nil {
				t.Fatal(err)
			}
			if grace := time.Duration(o.Spec.Template.Spec.Grace) * time.Second; grace < timeout+10*time.Second {
				t.Errorf("%s is killed %v after its SIGTERM, and needs up to %v and some", o.Metadata.Name, grace, timeout)
			}
		}
	})
}

func TestPartsAreInstalledAlone(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		var controller, node int
		for _, o := range objects {
			switch o.Metadata.Labels["app.kubernetes.io/component"] {
			case "controller":
				controller++
			case "node":
				node++
			}
		}
		want := [2]bool{variant != "node-only", variant != "controller-only"}
		if have := [2]bool{controller > 0, node > 0}; have != want {
			t.Errorf("%d objects of the controller, %d of the node", controller, node)
		}
		if have := [2]bool{len(of(objects, "Deployment")) == 1, len(of(objects, "DaemonSet")) == 1}; have != want {
			t.Errorf("Deployment and DaemonSet: %v, want %v", have, want)
		}
		if have := len(of(objects, "CSIDriver")) == 1; have != want[1] {
			t.Errorf("the CSIDriver object is there: %v", have)
		}
		if !want[0] && len(of(objects, "ClusterRole"))+len(of(objects, "Role"))+len(of(objects, "PodDisruptionBudget")) > 0 {
			t.Error("there are rights, or a budget, without a controller")
		}
	})
}

// Selectors match the pods' labels and do not depend on values.
func TestSelectors(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		for _, o := range append(workloads(objects), of(objects, "PodDisruptionBudget")...) {
			selector := o.Spec.Selector.MatchLabels
			if len(selector) != 3 {
				t.Errorf("%s %s selects by %v", o.Kind, o.Metadata.Name, selector)
			}
			found := 0
			for _, w := range workloads(objects) {
				matches := true
				for key, value := range selector {
					matches = matches && w.Spec.Template.Metadata.Labels[key] == value
				}
				if matches {
					found++
				}
			}
			if found != 1 {
				t.Errorf("%s %s selects the pods of %d workloads", o.Kind, o.Metadata.Name, found)
			}
		}
	})
}

// mountedAt returns the objects whose keys are files of a directory of the driver's container, with the last one's files replacing those
// of the others.
func mountedAt(t *testing.T, o object, dir string) (sources []string) {
	t.Helper()
	volume := ""
	for _, m := range driverOf(t, o).VolumeMounts {
		if m.MountPath == dir {
			volume = m.Name
		}
	}
	for _, v := range o.Spec.Template.Spec.Volumes {
		if v.Name != volume {
			continue
		}
		if v.ConfigMap != nil {
			sources = append(sources, "ConfigMap "+v.ConfigMap.Name)
		}
		for _, s := range v.Projected.Sources {
			if s.ConfigMap != nil {
				sources = append(sources, "ConfigMap "+s.ConfigMap.Name)
			}
			if s.Secret != nil {
				sources = append(sources, "Secret "+s.Secret.Name)
			}
		}
	}
	return sources
}

// The config and the certificates are mounted where the driver and the backends expect them.
func TestConfigIsMounted(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		if variant == "existing-config" {
			return // TestExistingObjects
		}
		for _, o := range workloads(objects) {
			driver := driverOf(t, o)
			config := driver.flag("config")
			maps := slices.DeleteFunc(of(objects, "ConfigMap"), func(o object) bool { return strings.HasSuffix(o.Metadata.Name, "-dashboard") })
			if (config != "") != (len(maps) == 1) {
				t.Fatalf("--config is %q, with %d ConfigMaps", config, len(maps))
			}
			if config == "" {
				continue
			}
			sources := mountedAt(t, o, filepath.Dir(config))
			if len(sources) == 0 || sources[len(sources)-1] != "ConfigMap "+maps[0].Metadata.Name || maps[0].Data[filepath.Base(config)] == "" {
				t.Errorf("%s: there is nothing at %s", o.Metadata.Name, config)
			}
		}
	})
}

func TestOneControllerAtATime(t *testing.T) {
	d := one(t, template(t, "--values", values("single-controller")), "Deployment")
	if d.Spec.Replicas != 1 || d.Spec.Strategy.Type != "Recreate" {
		t.Errorf("%d replicas, strategy %s", d.Spec.Replicas, d.Spec.Strategy.Type)
	}
	if d := one(t, template(t), "Deployment"); d.Spec.Strategy.Type != "RollingUpdate" {
		t.Errorf("strategy %s", d.Spec.Strategy.Type)
	}
}

func TestDisruptionBudget(t *testing.T) {
	for replicas, want := range map[string]int{"1": 0, "2": 1} {
		if have := len(of(template(t, "--set", "controller.replicas="+replicas), "PodDisruptionBudget")); have != want {
			t.Errorf("%s replicas: %d budgets", replicas, have)
		}
	}
}

// Driver and helpers resolve names as configured.
func TestNames(t *testing.T) {
	for _, c := range []struct{ network, dns, want string }{
		{"true", "pod", "ClusterFirstWithHostNet"}, {"true", "host", "Default"}, {"false", "pod", "ClusterFirst"}, {"false", "host", "Default"},
	} {
		d := one(t, template(t, "--set", "node.hostNetwork="+c.network, "--set", "node.dns="+c.dns), "DaemonSet")
		if spec := d.Spec.Template.Spec; spec.DNSPolicy != c.want || driverOf(t, d).flag("node-dns") != c.dns {
			t.Errorf("hostNetwork %s, dns %s: %s and --node-dns=%s", c.network, c.dns, spec.DNSPolicy, driverOf(t, d).flag("node-dns"))
		}
	}
}

// Services and monitors use ports of the pods, and metrics are exposed only if enabled.
func TestMetrics(t *testing.T) {
	for variant, want := range map[string]struct{ services, serviceMonitors, podMonitors int }{
		"default":         {0, 0, 0},
		"controller-only": {1, 0, 0},
		"service-monitor": {2, 2, 0},
		"pod-monitor":     {2, 0, 2},
	} {
		objects := template(t, "--values", values(variant))
		services := of(objects, "Service")
		if len(services) != want.services || len(of(objects, "ServiceMonitor")) != want.serviceMonitors || len(of(objects, "PodMonitor")) != want.podMonitors {
			t.Errorf("%s: %d services, %d and %d monitors", variant, len(services), len(of(objects, "ServiceMonitor")), len(of(objects, "PodMonitor")))
		}
		ports := map[string]int{} // component/name → number
		for _, o := range workloads(objects) {
			for _, c := range o.Spec.Template.Spec.Containers {
				for _, p := range c.Ports {
					ports[o.Metadata.Labels["app.kubernetes.io/component"]+"/"+p.Name] = p.ContainerPort
				}
			}
		}
		served := map[string]bool{}
		for _, s := range services {
			for _, p := range s.Spec.Ports {
				name := s.Metadata.Labels["app.kubernetes.io/component"] + "/" + p.TargetPort
				served[name] = true
				if ports[name] == 0 || ports[name] != p.Port || p.Name != p.TargetPort {
					t.Errorf("%s: the service has %+v, the pods %v", variant, p, ports)
				}
			}
		}
		for _, m := range append(of(objects, "ServiceMonitor"), of(objects, "PodMonitor")...) {
			endpoints := append(m.Spec.Endpoints, m.Spec.PodEndpoints...)
			if len(endpoints) == 0 {
				t.Errorf("%s: %s looks at nothing", variant, m.Metadata.Name)
			}
			for _, e := range endpoints {
				if !served[m.Metadata.Labels["app.kubernetes.io/component"]+"/"+e.Port] || e.Interval == "" {
					t.Errorf("%s: %s looks at %+v", variant, m.Metadata.Name, e)
				}
			}
		}
	}
}
