package chart

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/s3-csi/s3-csi-driver/pkg/driver"
)

// containers returns the containers of all workloads, by "component/container".
func containers(objects []object) map[string]container {
	all := map[string]container{}
	for _, o := range workloads(objects) {
		for _, c := range o.Spec.Template.Spec.Containers {
			all[o.Metadata.Labels["app.kubernetes.io/component"]+"/"+c.Name] = c
		}
	}
	return all
}

// Every container has extraArgs, which come after the chart's own arguments.
func TestExtraArgs(t *testing.T) {
	objects := template(t, withValues(t, `
controller: {extraArgs: [--v=1]}
node: {extraArgs: [--v=2]}
snapshots: {enabled: true}
sidecars:
  provisioner: {extraArgs: [--v=3]}
  resizer: {enabled: true, extraArgs: [--v=4]}
  snapshotter: {extraArgs: [--v=7]}
  nodeDriverRegistrar: {extraArgs: [--v=5]}
  livenessProbe: {extraArgs: [--v=6]}
`)...)
	want := map[string]string{
		"controller/s3-csi-driver": "--v=1", "node/s3-csi-driver": "--v=2", "controller/csi-provisioner": "--v=3", "controller/csi-resizer": "--v=4",
		"controller/csi-snapshotter": "--v=7",
		"node/node-driver-registrar": "--v=5", "controller/liveness-probe": "--v=6", "node/liveness-probe": "--v=6",
	}
	for name, c := range containers(objects) {
		if have := c.Args[len(c.Args)-1]; have != want[name] {
			t.Errorf("the last argument of %s is %s, want %q", name, have, want[name])
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("there are no containers %v", want)
	}
}

// Every object, and every pod, has the chart's labels, the common ones and the common annotations. The chart's own cannot be replaced.
func TestMetadata(t *testing.T) {
	const name = "app.kubernetes.io/name"
	common := withValues(t, "commonLabels: {common: l, "+name+": other, own: common}\ncommonAnnotations: {common: a, own: common}")
	for _, variant := range variants(t) {
		for _, o := range template(t, append(common, "--values", values(variant))...) {
			labels, annotations := o.Metadata.Labels, o.Metadata.Annotations
			if labels["common"] != "l" || annotations["common"] != "a" {
				t.Errorf("%s: %s %s has %v and %v", variant, o.Kind, o.Metadata.Name, labels, annotations)
			}
			if labels[name] == "other" || labels["app.kubernetes.io/managed-by"] != "Helm" || !strings.HasPrefix(labels["helm.sh/chart"], "s3-csi-driver-") ||
				labels["app.kubernetes.io/part-of"] != "s3-csi-driver" {
				t.Errorf("%s: %s %s has the labels %v", variant, o.Kind, o.Metadata.Name, labels)
			}
			if o.Kind != "Deployment" && o.Kind != "DaemonSet" {
				continue
			}
			labels, annotations = o.Spec.Template.Metadata.Labels, o.Spec.Template.Metadata.Annotations
			if labels["common"] != "l" || annotations["common"] != "a" || labels[name] == "other" ||
				annotations["kubectl.kubernetes.io/default-container"] != "s3-csi-driver" {
				t.Errorf("%s: the pods of %s have %v and %v", variant, o.Metadata.Name, labels, annotations)
			}
			if labels["helm.sh/chart"] != "" {
				t.Errorf("%s: pods of %s are replaced with every version of the chart", variant, o.Metadata.Name)
			}
		}
	}
	// What a value says of one object wins over common values.
	objects := template(t, append(common, withValues(t, `
controller: {podLabels: {own: pod}, podAnnotations: {own: pod}, serviceAccount: {annotations: {own: account}}}
storageClasses: [{name: a, default: true, labels: {own: class}, annotations: {own: class}}]
secrets: [{name: a, stringData: {}, labels: {own: secret}, annotations: {own: secret}}]
metrics: {enabled: true, serviceAnnotations: {own: service}, serviceMonitor: {enabled: true, labels: {own: monitor}}, prometheusRule: {enabled: true,
  labels: {own: rule}}, dashboard: {enabled: true, labels: {own: dashboard}, annotations: {own: dashboard}}}
`)...)...)
	pods := one(t, objects, "Deployment").Spec.Template.Metadata
	if pods.Labels["own"] != "pod" || pods.Annotations["own"] != "pod" {
		t.Errorf("the pods have %v and %v", pods.Labels, pods.Annotations)
	}
	for kind, want := range map[string][2]string{
		"StorageClass": {"class", "class"}, "Secret": {"secret", "secret"}, "Service": {"common", "service"}, "ServiceMonitor": {"monitor", "common"},
		"PrometheusRule": {"rule", "common"}, "ConfigMap": {"dashboard", "dashboard"},
	} {
		for _, o := range of(objects, kind) {
			if have := [2]string{o.Metadata.Labels["own"], o.Metadata.Annotations["own"]}; have != want {
				t.Errorf("%s has %q, want %q", kind, have, want)
			}
		}
	}
	if class := one(t, objects, "StorageClass"); class.Metadata.Annotations["storageclass.kubernetes.io/is-default-class"] != "true" {
		t.Errorf("the class has the annotations %v", class.Metadata.Annotations)
	}
	if account := of(objects, "ServiceAccount")[0]; account.Metadata.Annotations["own"] != "account" {
		t.Errorf("%s has the annotations %v", account.Metadata.Name, account.Metadata.Annotations)
	}
}

// A NetworkPolicy selects the pods of its component, and allows what serves metrics in and what values say out.
func TestNetworkPolicies(t *testing.T) {
	const both = "controller: {networkPolicy: {enabled: true}}\nnode: {hostNetwork: false, networkPolicy: {enabled: true}}\n"
	for name, c := range map[string]struct {
		values string
		want   []string
	}{
		"by default": {"", nil},
		"for both":   {both, []string{"controller Ingress: in to [], out to []", "node Ingress: in to [], out to []"}},
		"the metrics": {both + "metrics: {enabled: true}\nsidecars: {resizer: {enabled: true}}",
			[]string{"controller Ingress: in to [driver provisioner resizer] of 0, out to []", "node Ingress: in to [driver] of 0, out to []"}},
		"some of it": {"metrics: {enabled: true}\ncontroller: {networkPolicy: {enabled: true, metricsFrom: [{podSelector: {}}], egress: [{to: [{ipBlock: {cidr: " +
			"10.0.0.0/8}}], ports: [{port: 443}]}]}}",
			[]string{"controller Ingress,Egress: in to [driver provisioner] of 1, out to [53 53] of 0 [443] of 1"}},
		"no controller": {both + "nodeComponentOnly: true", []string{"node Ingress: in to [], out to []"}},
		"no node":       {both + "controllerOnly: true", []string{"controller Ingress: in to [], out to []"}},
	} {
		t.Run(name, func(t *testing.T) {
			rules := func(all []traffic) string {
				text := ""
				for _, r := range all {
					var ports []any
					for _, p := range r.Ports {
						ports = append(ports, p.Port)
					}
					text += fmt.Sprintf(" %v of %d", ports, len(r.From)+len(r.To))
				}
				if text == "" {
					return " []"
				}
				return text
			}
			objects := template(t, withValues(t, c.values)...)
			var have []string
			for _, o := range of(objects, "NetworkPolicy") {
				component := o.Metadata.Labels["app.kubernetes.io/component"]
				have = append(have, fmt.Sprintf("%s %s: in to%s, out to%s", component, strings.Join(o.Spec.PolicyTypes, ","), rules(o.Spec.Ingress), rules(o.Spec.Egress)))
				for _, w := range workloads(objects) {
					if same := w.Metadata.Labels["app.kubernetes.io/component"] == component; maps.Equal(o.Spec.PodSelector.MatchLabels, w.Spec.Selector.MatchLabels) != same {
						t.Errorf("the policy of %s selects %v", component, o.Spec.PodSelector.MatchLabels)
					}
				}
			}
			if !slices.Equal(have, c.want) {
				t.Errorf("%q, want %q", have, c.want)
			}
		})
	}
}

// helm test runs a pod that checks what the controller uses, as the controller: with its identity, its network, its files and its
// environment.
func TestCheckPod(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		pods := of(objects, "Pod")
		controllers := of(objects, "Deployment")
		if len(pods) != len(controllers) {
			t.Fatalf("%d pods for %d controllers", len(pods), len(controllers))
		}
		for i, p := range pods {
			if p.Metadata.Annotations["helm.sh/hook"] != "test" {
				t.Errorf("the pod has the annotations %v, and is installed", p.Metadata.Annotations)
			}
			// The same pod without what only the controller has.
			have, _ := p.raw["spec"].(map[string]any)
			template, _ := controllers[i].raw["spec"].(map[string]any)["template"].(map[string]any)
			want, _ := template["spec"].(map[string]any)
			for _, field := range []string{"serviceAccountName", "automountServiceAccountToken", "imagePullSecrets", "hostNetwork", "dnsPolicy", "securityContext",
				"nodeSelector", "tolerations", "affinity"} {
				if !reflect.DeepEqual(have[field], want[field]) {
					t.Errorf("%s is %v, and the controller's %v", field, have[field], want[field])
				}
			}
			check, controller := onlyContainer(t, p), containerNamed(t, want, "s3-csi-driver")
			for _, field := range []string{"image", "imagePullPolicy", "securityContext", "envFrom"} {
				if !reflect.DeepEqual(check[field], controller[field]) {
					t.Errorf("%s is %v, and the controller's %v", field, check[field], controller[field])
				}
			}
			var c, d container
			convert(t, check, &c)
			convert(t, controller, &d)
			for _, m := range c.VolumeMounts {
				if !slices.Contains(d.VolumeMounts, m) {
					t.Errorf("it mounts %+v, and the controller does not", m)
				}
			}
			if len(c.VolumeMounts) != len(d.VolumeMounts)-1 { // the socket's directory
				t.Errorf("%d mounts, and the controller has %d", len(c.VolumeMounts), len(d.VolumeMounts))
			}
			options, err := driver.Parse(c.Args, environment())
			if err != nil || options.Mode != driver.ModeCheck || options.Common.Config != d.flag("config") {
				t.Errorf("%q: %v", c.Args, err)
			}
		}
	})
	const values = `
driverCredentials: {secretName: own}
controller: {extraEnv: [{name: AWS_REGION, value: eu-central-1}], extraEnvFrom: [{configMapRef: {name: x}}]}
`
	keys := func(more string) (names, secrets []string, c container) {
		pods := of(template(t, append(withValues(t, values), withValues(t, more)...)...), "Pod")
		if len(pods) == 0 {
			return nil, nil, c
		}
		raw := onlyContainer(t, pods[0])
		convert(t, raw, &c)
		env, _ := raw["env"].([]any)
		for _, e := range env {
			v, _ := e.(map[string]any)
			names = append(names, fmt.Sprint(v["name"]))
			from, _ := v["valueFrom"].(map[string]any)
			if ref, ok := from["secretKeyRef"].(map[string]any); ok {
				secrets = append(secrets, fmt.Sprint(ref["name"]))
			}
		}
		return names, secrets, c
	}
	if names, secrets, _ := keys(""); !slices.Equal(secrets, []string{"own", "own"}) || !slices.Contains(names, "AWS_REGION") {
		t.Errorf("variables %q, of the secrets %q", names, secrets)
	}
	if names, secrets, _ := keys("test: {secretName: other}"); !slices.Equal(secrets, []string{"other", "other"}) || !slices.Contains(names, "AWS_REGION") {
		t.Errorf("variables %q, of the secrets %q", names, secrets)
	}
	if _, _, c := keys(""); !slices.Contains(c.Args, "--create-bucket") {
		t.Errorf("arguments %q", c.Args)
	}
	if _, _, c := keys("test: {bucket: data, extraArgs: [--backend=a]}"); c.flag("bucket") != "data" || c.flag("backend") != "a" {
		t.Errorf("arguments %q", c.Args)
	}
	if names, _, _ := keys("test: {enabled: false}"); names != nil {
		t.Error("there is a pod")
	}
}

// onlyContainer returns the container of a pod that has one.
func onlyContainer(t *testing.T, pod object) map[string]any {
	t.Helper()
	spec, _ := pod.raw["spec"].(map[string]any)
	if list, _ := spec["containers"].([]any); len(list) != 1 {
		t.Fatalf("%d containers", len(list))
	}
	return containerNamed(t, spec, "s3-csi-driver")
}

func containerNamed(t *testing.T, spec map[string]any, name string) map[string]any {
	t.Helper()
	list, _ := spec["containers"].([]any)
	for _, entry := range list {
		if c, ok := entry.(map[string]any); ok && c["name"] == name {
			return c
		}
	}
	t.Fatalf("there is no container %s", name)
	return nil
}

// convert decodes an object into a struct.
func convert(t *testing.T, from, to any) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(text(t, from)), to); err != nil {
		t.Fatal(err)
	}
}

// On OpenShift, the service accounts of the pods may use the constraints that their pods need.
func TestOpenShift(t *testing.T) {
	const role = "system:openshift:scc:"
	for name, c := range map[string]struct {
		values string
		want   map[string]string // by service account
	}{
		"elsewhere": {"", map[string]string{}},
		"on it": {"openshift: {enabled: true}", map[string]string{"s3-csi-driver-controller": role + "nonroot-v2",
			"s3-csi-driver-node": role + "privileged"}},
		"nodes": {"openshift: {enabled: true}\nnodeComponentOnly: true", map[string]string{"s3-csi-driver-node": role + "privileged"}},
		"other account": {"openshift: {enabled: true}\ncontrollerOnly: true\ncontroller: {serviceAccount: {name: mine}}",
			map[string]string{"mine": role + "nonroot-v2"}},
	} {
		t.Run(name, func(t *testing.T) {
			objects := template(t, withValues(t, c.values)...)
			have := map[string]string{}
			for _, o := range of(objects, "RoleBinding") {
				if strings.HasPrefix(o.RoleRef.Name, role) {
					if o.RoleRef.Kind != "ClusterRole" || o.Metadata.Namespace != namespace || o.Subjects[0].Namespace != namespace {
						t.Errorf("%+v binds %+v", o.RoleRef, o.Subjects)
					}
					have[o.Subjects[0].Name] = o.RoleRef.Name
				}
			}
			if !maps.Equal(have, c.want) {
				t.Errorf("%v, want %v", have, c.want)
			}
			for _, o := range workloads(objects) {
				if account := o.Spec.Template.Spec.ServiceAccountName; len(c.want) > 0 && c.want[account] == "" {
					t.Errorf("%s runs as %s, which may not use any", o.Metadata.Name, account)
				}
			}
		})
	}
}

// The CSIDriver object has the field only if asked, and only where the API server knows it: Kubernetes 1.36 was the first.
func TestPodsAreScheduledToNodesWithTheDriver(t *testing.T) {
	const field = "preventPodSchedulingIfMissing"
	for _, tc := range []struct {
		cluster, value string
		want, fails    bool
	}{
		{"1.36.0", "false", false, false},
		{"1.36.0", "true", true, false},
		{"1.37.1", "true", true, false},
		{"1.35.4", "false", false, false},
		{"1.35.4", "true", false, true},
	} {
		out, all, err := run(t, helm(t), "template", release, chartDir, "--kube-version", tc.cluster, "--set", "csiDriver."+field+"="+tc.value)
		if (err != nil) != tc.fails || tc.fails && !strings.Contains(all, field+" requires") {
			t.Errorf("Kubernetes %s, %s: %v", tc.cluster, tc.value, all)
		}
		if tc.fails {
			continue
		}
		spec, _ := one(t, parse(t, out), "CSIDriver").raw["spec"].(map[string]any)
		if have, _ := spec[field].(bool); have != tc.want {
			t.Errorf("Kubernetes %s, %s: %v", tc.cluster, tc.value, have)
		}
	}
}

// Config file and certificates can come from objects that the chart does not make.
func TestExistingObjects(t *testing.T) {
	const (
		dir     = "/etc/s3-csi-driver"
		backend = "backends: {a: {caFile: /etc/s3-csi-driver/ca.crt}}\n"
	)
	for name, c := range map[string]struct {
		values   string
		mounted  []string
		own      int
		audience string
		strategy string
	}{
		"the chart's":        {"backends: {a: {}}", []string{"ConfigMap s3-csi-driver-config"}, 1, "sts.amazonaws.com", "RollingUpdate"},
		"a ConfigMap":        {"existingConfig: {configMapName: x}", []string{"ConfigMap x"}, 0, "", "RollingUpdate"},
		"a Secret":           {"existingConfig: {secretName: x}", []string{"Secret x"}, 0, "", "RollingUpdate"},
		"for one controller": {"existingConfig: {secretName: x, singleController: true}\ncontroller: {replicas: 1}", []string{"Secret x"}, 0, "", "Recreate"},
		"its client":         {"existingConfig: {secretName: x}\nnode: {defaultClient: other}", []string{"Secret x"}, 0, "", "RollingUpdate"},
		"certificates": {backend + "existingCACertificates: {configMapName: ca}", []string{"ConfigMap ca", "ConfigMap s3-csi-driver-config"}, 1,
			"sts.amazonaws.com", "RollingUpdate"},
		"certificates of Secrets": {backend + "existingCACertificates: {secretName: tls}", []string{"Secret tls", "ConfigMap s3-csi-driver-config"}, 1,
			"sts.amazonaws.com", "RollingUpdate"},
		"all of it": {"existingConfig: {configMapName: x}\nexistingCACertificates: {configMapName: ca, secretName: tls}",
			[]string{"ConfigMap ca", "Secret tls", "ConfigMap x"}, 0, "", "RollingUpdate"},
	} {
		t.Run(name, func(t *testing.T) {
			objects := template(t, withValues(t, c.values)...)
			if have := len(of(objects, "ConfigMap")); have != c.own {
				t.Errorf("%d ConfigMaps, want %d", have, c.own)
			}
			for _, o := range workloads(objects) {
				if have := driverOf(t, o).flag("config"); have != dir+"/config.yaml" {
					t.Errorf("%s has --config=%s", o.Metadata.Name, have)
				}
				if have := mountedAt(t, o, dir); !slices.Equal(have, c.mounted) {
					t.Errorf("%s mounts %q, want %q", o.Metadata.Name, have, c.mounted)
				}
			}
			audience := ""
			for _, r := range one(t, objects, "CSIDriver").Spec.TokenRequests {
				audience += r.Audience
			}
			if audience != c.audience {
				t.Errorf("tokens for %q, want %q", audience, c.audience)
			}
			if have := one(t, objects, "Deployment").Spec.Strategy.Type; have != c.strategy {
				t.Errorf("strategy %s, want %s", have, c.strategy)
			}
		})
	}
}

// The node's driver gets the limit of volumes and the metrics of mounts, and the dashboard is the one that is tested.
func TestVolumesOfNodes(t *testing.T) {
	for values, want := range map[string][]string{
		"{}":                              {"--volume-attach-limit=0"},
		"node: {volumeAttachLimit: 12}":   {"--volume-attach-limit=12"},
		"node: {volumeAttachLimit: auto}": {"--volume-attach-limit=auto"},
		"metrics: {enabled: true, volumes: true}": {"--volume-attach-limit=0", "--volume-metrics"},
	} {
		args := containers(template(t, withValues(t, values)...))["node/s3-csi-driver"].Args
		have := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return !strings.HasPrefix(a, "--volume-") })
		if !slices.Equal(have, want) {
			t.Errorf("%s: %q, want %q", values, have, want)
		}
	}
	dashboard := one(t, template(t, withValues(t, "metrics: {enabled: true, dashboard: {enabled: true}}")...), "ConfigMap")
	var have, want any
	if err := json.Unmarshal([]byte(dashboard.Data["s3-csi-driver.json"]), &have); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(readDocument(t, root+"/charts/s3-csi-driver/dashboard.json")), &want); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(have, want) || dashboard.Metadata.Labels["grafana_dashboard"] != "1" {
		t.Errorf("%+v", dashboard.Metadata)
	}
}

// Values of pods and of their workloads arrive where they belong.
func TestPodValues(t *testing.T) {
	const pod = `{revisionHistoryLimit: 3, annotations: {own: workload}, hostAliases: [{ip: 10.0.0.1, hostnames: [s3.lab]}], ` +
		`dnsConfig: {options: [{name: ndots, value: "1"}]}, initContainers: [{name: before, image: busybox}]`
	objects := template(t, withValues(t, "controller: "+pod+", updateStrategy: {type: Recreate}, podDisruptionBudget: {unhealthyPodEvictionPolicy: "+
		"AlwaysAllow}}\nnode: "+pod+", mountTimeout: 3m}\n")...)
	for _, o := range workloads(objects) {
		s := o.Spec.Template.Spec
		if o.Spec.RevisionHistoryLimit != 3 || o.Metadata.Annotations["own"] != "workload" || len(s.InitContainers) != 1 || s.InitContainers[0].Name != "before" {
			t.Errorf("%s: history %d, annotations %v, init containers %v", o.Kind, o.Spec.RevisionHistoryLimit, o.Metadata.Annotations, s.InitContainers)
		}
		if len(s.HostAliases) != 1 || s.HostAliases[0].IP != "10.0.0.1" || len(s.DNSConfig.Options) != 1 || s.DNSConfig.Options[0].Name != "ndots" ||
			s.ServiceLinks == nil || *s.ServiceLinks {
			t.Errorf("%s: names by %v, %v and service links %v", o.Kind, s.HostAliases, s.DNSConfig, s.ServiceLinks)
		}
	}
	if have := one(t, objects, "Deployment").Spec.Strategy.Type; have != "Recreate" {
		t.Errorf("the strategy is %s", have)
	}
	if have := one(t, objects, "PodDisruptionBudget").Spec.Eviction; have != "AlwaysAllow" {
		t.Errorf("the policy is %q", have)
	}
	if args := driverOf(t, one(t, objects, "DaemonSet")).Args; !slices.Contains(args, "--mount-timeout=3m") {
		t.Errorf("the driver has %q", args)
	}
}

// Relabelings of monitors are those of each endpoint.
func TestRelabelings(t *testing.T) {
	const monitor = `{enabled: true, interval: 1m, scrapeTimeout: 20s, relabelings: [{targetLabel: node}], metricRelabelings: [{action: drop}]}`
	for kind, value := range map[string]string{"ServiceMonitor": "serviceMonitor", "PodMonitor": "podMonitor"} {
		monitors := of(template(t, withValues(t, "metrics: {enabled: true, "+value+": "+monitor+"}\n")...), kind)
		if len(monitors) != 2 {
			t.Errorf("%d objects of kind %s", len(monitors), kind)
		}
		for _, o := range monitors {
			for _, e := range append(o.Spec.Endpoints, o.Spec.PodEndpoints...) {
				if e.Interval != "1m" || e.Timeout != "20s" || len(e.Relabelings) != 1 || e.Relabelings[0]["targetLabel"] != "node" || len(e.MetricRelabelings) != 1 ||
					e.MetricRelabelings[0]["action"] != "drop" {
					t.Errorf("%s %s: %+v", kind, o.Metadata.Name, e)
				}
			}
		}
	}
}

// Further objects are installed with their templates filled in.
func TestExtraObjects(t *testing.T) {
	objects := template(t, withValues(t, `
extraObjects:
  - {apiVersion: v1, kind: ResourceQuota, metadata: {name: "{{ .Release.Name }}-quota", namespace: "{{ .Release.Namespace }}"}}
  - {apiVersion: v1, kind: LimitRange, metadata: {name: limits}}
`)...)
	if quota := one(t, objects, "ResourceQuota"); quota.Metadata.Name != release+"-quota" || quota.Metadata.Namespace != namespace {
		t.Errorf("%+v", quota.Metadata)
	}
	one(t, objects, "LimitRange")
}
