package chart

import (
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// object is a Kubernetes object with the fields that the tests use.
type object struct {
	raw map[string]any

	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name        string            `json:"name"`
		Namespace   string            `json:"namespace"`
		Labels      map[string]string `json:"labels"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Data         map[string]string `json:"data"`
	StringData   map[string]string `json:"stringData"`
	Provisioner  string            `json:"provisioner"`
	Parameters   map[string]string `json:"parameters"`
	DriverName   string            `json:"driverName"`
	Expandable   bool              `json:"allowVolumeExpansion"`
	MountOptions []string          `json:"mountOptions"`
	Rules        []rule            `json:"rules"`
	Subjects     []subject         `json:"subjects"`
	RoleRef      subject           `json:"roleRef"`
	Automount    *bool             `json:"automountServiceAccountToken"`
	Spec         struct {
		Replicas             int    `json:"replicas"`
		RevisionHistoryLimit int    `json:"revisionHistoryLimit"`
		Eviction             string `json:"unhealthyPodEvictionPolicy"` // of a PodDisruptionBudget
		Strategy             struct {
			Type string `json:"type"`
		} `json:"strategy"`
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		Template struct {
			Metadata struct {
				Labels      map[string]string `json:"labels"`
				Annotations map[string]string `json:"annotations"`
			} `json:"metadata"`
			Spec podSpec `json:"spec"`
		} `json:"template"`
		TokenRequests []struct {
			Audience          string `json:"audience"`
			ExpirationSeconds int64  `json:"expirationSeconds"`
		} `json:"tokenRequests"`
		TokenInSecrets bool `json:"serviceAccountTokenInSecrets"`
		Ports          []struct {
			Name       string `json:"name"`
			Port       int    `json:"port"`
			TargetPort string `json:"targetPort"`
		} `json:"ports"` // of a Service
		Endpoints            []endpoint `json:"endpoints"`           // of a ServiceMonitor
		PodEndpoints         []endpoint `json:"podMetricsEndpoints"` // of a PodMonitor
		VolumeLifecycleModes []string   `json:"volumeLifecycleModes"`
		PodSelector          struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"podSelector"` // of a NetworkPolicy, as the next ones
		PolicyTypes []string  `json:"policyTypes"`
		Ingress     []traffic `json:"ingress"`
		Egress      []traffic `json:"egress"`
	} `json:"spec"`
}

type rule struct {
	APIGroups     []string `json:"apiGroups"`
	Resources     []string `json:"resources"`
	ResourceNames []string `json:"resourceNames"`
	Verbs         []string `json:"verbs"`
}

type endpoint struct {
	Port              string           `json:"port"`
	Interval          string           `json:"interval"`
	Timeout           string           `json:"scrapeTimeout"`
	Relabelings       []map[string]any `json:"relabelings"`
	MetricRelabelings []map[string]any `json:"metricRelabelings"`
}

type traffic struct {
	From  []map[string]any `json:"from"`
	To    []map[string]any `json:"to"`
	Ports []struct {
		Port any `json:"port"`
	} `json:"ports"`
}

type subject struct {
	Kind, Name, Namespace string
}

type named struct {
	Name string `json:"name"`
}

type podSpec struct {
	ServiceAccountName string `json:"serviceAccountName"`
	Automount          *bool  `json:"automountServiceAccountToken"`
	HostNetwork        bool   `json:"hostNetwork"`
	HostPID            bool   `json:"hostPID"`
	DNSPolicy          string `json:"dnsPolicy"`
	DNSConfig          struct {
		Options []named `json:"options"`
	} `json:"dnsConfig"`
	HostAliases []struct {
		IP string `json:"ip"`
	} `json:"hostAliases"`
	ServiceLinks   *bool       `json:"enableServiceLinks"`
	Grace          int         `json:"terminationGracePeriodSeconds"`
	Containers     []container `json:"containers"`
	InitContainers []container `json:"initContainers"`
	Volumes        []struct {
		Name     string `json:"name"`
		HostPath *struct {
			Path string `json:"path"`
			Type string `json:"type"`
		} `json:"hostPath"`
		ConfigMap *named `json:"configMap"`
		Projected struct {
			Sources []struct {
				ConfigMap *named `json:"configMap"`
				Secret    *named `json:"secret"`
			} `json:"sources"`
		} `json:"projected"`
	} `json:"volumes"`
	SecurityContext struct {
		RunAsNonRoot   bool  `json:"runAsNonRoot"`
		RunAsUser      int64 `json:"runAsUser"`
		SeccompProfile struct {
			Type string `json:"type"`
		} `json:"seccompProfile"`
	} `json:"securityContext"`
}

type container struct {
	Name  string   `json:"name"`
	Image string   `json:"image"`
	Pull  string   `json:"imagePullPolicy"`
	Args  []string `json:"args"`
	Env   []struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	} `json:"env"`
	Ports []struct {
		Name          string `json:"name"`
		ContainerPort int    `json:"containerPort"`
	} `json:"ports"`
	VolumeMounts []struct {
		Name             string `json:"name"`
		MountPath        string `json:"mountPath"`
		SubPath          string `json:"subPath"`
		MountPropagation string `json:"mountPropagation"`
	} `json:"volumeMounts"`
	StartupProbe    *probe `json:"startupProbe"`
	LivenessProbe   *probe `json:"livenessProbe"`
	ReadinessProbe  *probe `json:"readinessProbe"`
	SecurityContext struct {
		Privileged               bool  `json:"privileged"`
		AllowPrivilegeEscalation *bool `json:"allowPrivilegeEscalation"`
		ReadOnlyRootFilesystem   bool  `json:"readOnlyRootFilesystem"`
		Capabilities             struct {
			Add, Drop []string
		} `json:"capabilities"`
	} `json:"securityContext"`
}

type probe struct {
	HTTPGet struct {
		Host string `json:"host"`
		Path string `json:"path"`
		Port any    `json:"port"`
	} `json:"httpGet"`
}

// parse parses a stream of YAML documents.
func parse(t *testing.T, stream string) []object {
	t.Helper()
	var objects []object
	for doc := range strings.SplitSeq("\n"+stream, "\n---") {
		var o object
		if err := yaml.UnmarshalStrict([]byte(doc), &o.raw); err != nil {
			t.Fatalf("%v in:\n%s", err, doc)
		}
		if o.raw == nil { // nothing but comments
			continue
		}
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			t.Fatalf("%v in:\n%s", err, doc)
		}
		objects = append(objects, o)
	}
	if len(objects) == 0 {
		t.Fatal("no objects")
	}
	return objects
}

// of returns the objects of a kind.
func of(objects []object, kind string) []object {
	var found []object
	for _, o := range objects {
		if o.Kind == kind {
			found = append(found, o)
		}
	}
	return found
}

// one returns the only object of a kind.
func one(t *testing.T, objects []object, kind string) object {
	t.Helper()
	found := of(objects, kind)
	if len(found) != 1 {
		t.Fatalf("%d objects of kind %s, want one", len(found), kind)
	}
	return found[0]
}

// workloads returns the objects with pods.
func workloads(objects []object) []object {
	return append(of(objects, "Deployment"), of(objects, "DaemonSet")...)
}

// driverOf returns the driver's container.
func driverOf(t *testing.T, o object) container {
	t.Helper()
	return containerOf(t, o, "s3-csi-driver")
}

func containerOf(t *testing.T, o object, name string) container {
	t.Helper()
	i := slices.IndexFunc(o.Spec.Template.Spec.Containers, func(c container) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("%s %s has no container %s", o.Kind, o.Metadata.Name, name)
	}
	return o.Spec.Template.Spec.Containers[i]
}

// flag returns the value of a flag in a container's arguments, or "".
func (c container) flag(name string) string {
	for _, arg := range c.Args {
		if value, ok := strings.CutPrefix(arg, "--"+name+"="); ok {
			return value
		}
	}
	return ""
}
