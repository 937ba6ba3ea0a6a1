package chart

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// schema is a JSON schema with the fields that the tests use.
type schema struct {
	Ref         string             `json:"$ref"`
	Properties  map[string]*schema `json:"properties"`
	Additional  json.RawMessage    `json:"additionalProperties"`
	Items       *schema            `json:"items"`
	Enum        []any              `json:"enum"`
	Definitions map[string]*schema `json:"definitions"`
}

func readSchema(t *testing.T) *schema {
	t.Helper()
	text, err := os.ReadFile(chartDir + "/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var s schema
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	return &s
}

// at returns the schema at a path such as properties/node.
func (s *schema) at(t *testing.T, path string) *schema {
	t.Helper()
	words := strings.Split(path, "/")
	for len(words) > 0 && s != nil {
		switch words[0] {
		case "items":
			s, words = s.Items, words[1:]
		case "properties":
			s, words = s.Properties[words[1]], words[2:]
		case "definitions":
			s, words = s.Definitions[words[1]], words[2:]
		default:
			t.Fatalf("%s: %s?", path, words[0])
		}
	}
	if s == nil {
		t.Fatalf("the schema has no %s", path)
	}
	return s
}

// resolve resolves a reference.
func (s *schema) resolve(t *testing.T, node *schema) *schema {
	t.Helper()
	if name, ok := strings.CutPrefix(node.Ref, "#/definitions/"); ok {
		return s.at(t, "definitions/"+name)
	}
	return node
}

// Every object of the schema with properties rejects unknown ones.
func TestSchemaIsClosed(t *testing.T) {
	s := readSchema(t)
	objects := 0
	var walk func(path string, node *schema)
	walk = func(path string, node *schema) {
		if len(node.Properties) > 0 {
			objects++
			// Others decide on the keys of these: a variable, a volume and so on are Kubernetes' own objects, and a chart that has this one as
			// a dependency shares global with other charts.
			if string(node.Additional) != "false" && path != "/env/items" && path != "/global" {
				t.Errorf("%s takes any key", path)
			}
		}
		for name, p := range node.Properties {
			walk(path+"/"+name, p)
		}
		if node.Items != nil {
			walk(path+"/items", node.Items)
		}
	}
	walk("", s)
	for name, d := range s.Definitions {
		walk("/"+name, d)
	}
	if objects < 20 {
		t.Errorf("%d objects", objects)
	}
}

func TestSchemaRefuses(t *testing.T) {
	for name, c := range map[string]struct{ values, want string }{
		"an unknown key":              {"nodes: {}", "additional properties 'nodes' not allowed"},
		"one of a node":               {"node: {lancher: process}", "additional properties 'lancher' not allowed"},
		"one of a sidecar":            {"sidecars: {provisioner: {args: [-x]}}", "additional properties 'args' not allowed"},
		"one of a backend":            {"backends: {a: {enpoint: 'https://x'}}", "additional properties 'enpoint' not allowed"},
		"one of a backend's sts":      {"backends: {a: {sts: {audiences: [x]}}}", "additional properties 'audiences' not allowed"},
		"one of a class":              {"storageClasses: [{name: a, provisioner: x}]", "additional properties 'provisioner' not allowed"},
		"one of a secret":             {"secrets: [{name: a, data: {}}]", "additional properties 'data' not allowed"},
		"a class without a name":      {"storageClasses: [{parameters: {}}]", "missing property 'name'"},
		"a value that is taken away":  {"node: {heal: null}", "missing property 'heal'"},
		"a driver name of another CO": {"driverName: My_Driver", "does not match pattern"},
		"a text for a number":         {"controller: {replicas: '2'}", "got string, want integer"},
		"a number for a text":         {"driverName: 1", "got number, want string"},
		"a text for a boolean":        {"inlineVolumes: 'yes'", "got string, want boolean"},
		"a parameter's number":        {"storageClasses: [{name: a, parameters: {uid: 1000}}]", "got number, want string"},
		"an account's number":         {"backends: {a: {expectedBucketOwner: 111122223333}}", "got number, want string"},
		"a list for a map":            {"commonLabels: [a]", "got array, want object"},
		"a map for a list":            {"node: {extraArgs: {v: 5}}", "got object, want array"},
		"an argument that is none":    {"node: {extraArgs: [all]}", "does not match pattern"},
		"another launcher":            {"node: {launcher: docker}", "value must be one of 'auto', 'systemd', 'process'"},
		"another way of descriptors": {"clients: {a: {program: a, fuse: socket, drain: exits, cache: none}}",
			"value must be one of 'path', 'argument', 'fusermount'"},
		"half a declaration":         {"clients: {a: {program: a}}", "missing properties"},
		"another source":             {"backends: {a: {controllerCredentials: workload}}", "value must be one of 'driver', 'secret'"},
		"another scope":              {"backends: {a: {scope: on}}", "value must be one of 'required', 'auto', 'off', false"},
		"a rule that allows all":     {"backends: {a: {allow: [{}]}}", "minProperties"},
		"an endpoint with a path":    {"backends: {a: {endpoint: 'https://x/y'}}", "does not match pattern"},
		"a backend's name":           {"backends: {A: {}}", "does not match pattern"},
		"a relative path":            {"node: {kubeletPath: kubelet}", "does not match pattern"},
		"a slash at the end":         {"node: {kubeletPath: /var/lib/kubelet/}", "does not match pattern"},
		"a duration without a unit":  {"node: {hangTimeout: 120}", "value must be 0"},
		"a port for root only":       {"controller: {ports: {driver: 80}}", "minimum: got 80, want 1,024"},
		"no port":                    {"node: {ports: {driver: 70000}}", "maximum: got 70,000, want 65,535"},
		"too many workers":           {"controller: {deletionWorkers: 65}", "maximum: got 65, want 64"},
		"root":                       {"controller: {runAsUser: 0}", "minimum: got 0, want 1"},
		"a certificate that is none": {"backends: {a: {}}\ncaCertificates: {a: xyz}", "does not match pattern '-----BEGIN CERTIFICATE-----'"},
		"the config file's name":     {"backends: {a: {}}\ncaCertificates: {config.yaml: '-----BEGIN CERTIFICATE-----'}", "config.yaml"},
		"tokens that are too short":  {"csiDriver: {tokenRequests: {expirationSeconds: 60}}", "minimum: got 60, want 600"},
	} {
		t.Run(name, func(t *testing.T) {
			_, all, err := tryTemplate(t, withValues(t, c.values)...)
			if err == nil || !strings.Contains(all, "values don't meet the specifications of the schema") || !strings.Contains(all, c.want) {
				t.Errorf("want %q, got %v:\n%.600s", c.want, err, all)
			}
		})
	}
}

// The templates reject values that the schema cannot.
func TestTemplatesRefuse(t *testing.T) {
	for name, c := range map[string]struct{ values, want string }{
		"both parts alone":                {"nodeComponentOnly: true\ncontrollerOnly: true", "nodeComponentOnly and controllerOnly"},
		"attributes without a resizer":    {"volumeAttributesClasses: [{name: a, parameters: {onDelete: retain}}]", "require sidecars.resizer.enabled"},
		"snapshots without one":           {"volumeSnapshotClasses: [{name: a}]", "require snapshots.enabled"},
		"clients in pods without healing": {"podClients: {enabled: true}\nnode: {heal: false}", "requires node.heal"},
		"two controllers":                 {"backends: {a: {singleController: true}}", "set controller.replicas to 1"},
		"certificates without use":        {"caCertificates: {a: '-----BEGIN CERTIFICATE-----'}", "caCertificates is set"},
		"two config files":                {"existingConfig: {configMapName: a, secretName: b}", "can be in only one of them"},
		"backends beside a file":          {"existingConfig: {configMapName: a}\nbackends: {a: {}}", "existingConfig replaces backends"},
		"clients beside a file": {"existingConfig: {configMapName: a}\nclients: {a: {program: a, fuse: path, drain: exits, cache: none}}",
			"existingConfig replaces backends"},
		"certificates beside a file": {"existingConfig: {configMapName: a}\ncaCertificates: {a: '-----BEGIN CERTIFICATE-----'}",
			"existingConfig replaces backends"},
		"two controllers of a file":    {"existingConfig: {configMapName: a, singleController: true}", "set controller.replicas to 1"},
		"one controller of no file":    {"existingConfig: {singleController: true}\ncontroller: {replicas: 1}", "existingConfig.singleController is set without"},
		"existing certificates alone":  {"existingCACertificates: {secretName: a}", "existingCACertificates is set"},
		"a certificate that is not":    {"backends: {a: {caFile: /etc/s3-csi-driver/b}}", `backends.a.caFile is /etc/s3-csi-driver/b, but caCertificates has no "b"`},
		"a monitor of nothing":         {"metrics: {serviceMonitor: {enabled: true}}", "require metrics.enabled"},
		"alerts on nothing":            {"metrics: {prometheusRule: {enabled: true}}", "require metrics.enabled"},
		"a dashboard of nothing":       {"metrics: {dashboard: {enabled: true}}", "require metrics.enabled"},
		"metrics of mounts not served": {"metrics: {volumes: true}", "require metrics.enabled"},
		"a limit that is none":         {"node: {volumeAttachLimit: many}", "volumeAttachLimit"},
		"both monitors":                {"metrics: {enabled: true, serviceMonitor: {enabled: true}, podMonitor: {enabled: true}}", "enable only one of them"},
		"a port twice":                 {"node: {ports: {driver: 9808}}", "node.ports has the same port twice"},
		"a port of both":               {"controller: {hostNetwork: true, ports: {driver: 9810}}", "controller.ports and node.ports have a port in common"},
		"a policy for hosts":           {"node: {networkPolicy: {enabled: true}}", "node.networkPolicy.enabled cannot be combined with node.hostNetwork"},
		"one for the controller's": {"controller: {hostNetwork: true, networkPolicy: {enabled: true}}",
			"controller.networkPolicy.enabled cannot be combined with controller.hostNetwork"},
		"OpenShift without roles": {"openshift: {enabled: true}\nrbac: {create: false}", "openshift.enabled requires rbac.create"},
		"OpenShift's host network": {"openshift: {enabled: true}\ncontroller: {hostNetwork: true}",
			"openshift.enabled cannot be combined with controller.hostNetwork"},
		"a socket that is too long": {"node: {kubeletPath: /var/snap/" + strings.Repeat("x", 60) + "/kubelet}", "longer than 107 bytes"},
		"another client":            {"node: {defaultClient: goofys}", "node.defaultClient is goofys, which is neither mountpoint-s3, rclone nor in clients"},
		"another client of a backend": {"backends: {lab: {defaultClient: goofys}}",
			"backends.lab.defaultClient is goofys, which is neither mountpoint-s3, rclone nor in clients"},
		"a client of ours": {"clients: {rclone: {program: a, fuse: path, drain: exits, cache: none}}", "the name of one of the driver's own clients"},
	} {
		t.Run(name, func(t *testing.T) {
			_, all, err := tryTemplate(t, withValues(t, c.values)...)
			if err == nil || !strings.Contains(all, c.want) {
				t.Errorf("want %q, got %v:\n%.600s", c.want, err, all)
			}
		})
	}
}

func TestLint(t *testing.T) {
	helm(t)
	for _, variant := range variants(t) {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			_, all, err := run(t, helm(t), "lint", "--strict", chartDir, "--values", values(variant), "--kube-version", kubeVersion)
			if err != nil || !strings.Contains(all, "0 chart(s) failed") {
				t.Errorf("%v\n%s", err, all)
			}
		})
	}
}

// The notes warn about values that an operator should know the consequences of.
func TestNotes(t *testing.T) {
	const (
		cluster   = "clusterID"
		none      = "driverCredentials"
		process   = "node.launcher"
		inline    = "inlineVolumes"
		inPods    = "podClients.enabled"
		unread    = "rbac.secretNamespaces"
		everyone  = "rbac.secrets"
		metrics   = "metrics.enabled"
		nodeKeys  = "driverCredentials.node"
		inRelease = "secrets"
		network   = "node.hostNetwork"
		audiences = "csiDriver.tokenRequests.additional"
	)
	for name, c := range map[string]struct {
		values string
		want   []string
	}{
		"no cluster ID":         {"clusterID: ''", []string{cluster, none}},
		"by default":            {"", []string{none}},
		"a role":                {"controller: {serviceAccount: {annotations: {eks.amazonaws.com/role-arn: x}}}", nil},
		"keys":                  {"driverCredentials: {secretName: x}", nil},
		"keys on nodes":         {"driverCredentials: {secretName: x, node: true}", []string{nodeKeys}},
		"keys not for it":       {"driverCredentials: {secretName: x, controller: false}", []string{none}},
		"secrets that it reads": {"backends: {a: {controllerCredentials: secret}}\nrbac: {secretNamespaces: [x]}", nil},
		"secrets unread":        {"backends: {a: {controllerCredentials: secret}}", []string{unread}},
		"all secrets":           {"backends: {a: {controllerCredentials: secret}}\nrbac: {secrets: true}", []string{everyone}},
		"process":               {"node: {launcher: process}", []string{none, process}},
		"pod network":           {"node: {hostNetwork: false}", []string{none, network}},
		"inline":                {"inlineVolumes: true", []string{none, inline}},
		"clients in pods":       {"podClients: {enabled: true}", []string{none, inPods}},
		"metrics":               {"metrics: {enabled: true}", []string{none, metrics}},
		"secrets in the chart":  {"secrets: [{name: a, stringData: {}}]", []string{none, inRelease}},
		"an existing file":      {"existingConfig: {configMapName: a}", []string{audiences}},
		"and its audiences":     {"existingConfig: {configMapName: a}\ncsiDriver: {tokenRequests: {additional: [{audience: a}]}}", nil},
		"nodes alone":           {"nodeComponentOnly: true", nil},
		"controller alone":      {"controllerOnly: true\nnode: {launcher: process}\ninlineVolumes: true", []string{none}},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"install", release, chartDir, "--namespace", namespace, "--dry-run=client"}, withValues(t, "clusterID: one")...)
			args = append(args, withValues(t, c.values)...)
			out, all, err := run(t, helm(t), args...)
			if err != nil {
				t.Fatal(err, all)
			}
			_, notes, ok := strings.Cut(out, "\nNOTES:\n")
			if !ok || !strings.Contains(notes, "The S3 CSI driver s3.csi.driver") || !strings.Contains(notes, "rollout status") {
				t.Fatalf("no notes in:\n%s", all)
			}
			var warned []string
			for _, m := range regexp.MustCompile(`(?m)^- ([A-Za-z.]+): `).FindAllStringSubmatch(notes, -1) {
				warned = append(warned, m[1])
			}
			if !slices.Equal(warned, c.want) {
				t.Errorf("warnings about %q, want %q in:\n%s", warned, c.want, notes)
			}
			for _, word := range []string{"<no value>", "%!", "nil"} {
				if strings.Contains(notes, word) {
					t.Errorf("%q in:\n%s", word, notes)
				}
			}
		})
	}
}

// Clients in pods need a flag of the nodes' driver and a mode of the CSIDriver object, and bring no other inline volumes with them.
func TestPodClients(t *testing.T) {
	for values, want := range map[string]bool{"podClients: {enabled: true}": true, "": false} {
		args := append([]string{"template", release, chartDir, "--namespace", namespace}, withValues(t, "clusterID: one")...)
		out, all, err := run(t, helm(t), append(args, withValues(t, values)...)...)
		if err != nil {
			t.Fatal(err, all)
		}
		for _, text := range []string{"- --pod-clients\n", "    - Ephemeral\n"} {
			if strings.Contains(out, text) != want {
				t.Errorf("%q: it has %q: %t", values, text, !want)
			}
		}
		if !strings.Contains(out, "- --inline-volumes=false\n") {
			t.Errorf("%q: inline volumes are on", values)
		}
	}
}
