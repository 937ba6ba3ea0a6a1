//go:build !lane || deploy

package e2e

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"sigs.k8s.io/yaml"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

const examplesDir = root + "/examples"

// example says where the data of a file's volumes is. Each file is applied as it is, but for what adapted replaces.
type example struct {
	// made is what the places of new volumes look like: bucket/prefix/.
	made string
	// existing are the places of volumes that are not made, by the name of the PersistentVolume, or of the pod that defines it.
	existing map[string]string
	// driver is the name that the driver has to have, if it is another than the installed one's; config is its config file.
	driver, config string
}

// examples are the files with objects. All of them work in this cluster.
var examples = map[string]example{
	"inline.yaml":                   {existing: map[string]string{"report": "reference/genomes/", "trainer": "team-data/research/runs/"}},
	"secret.yaml":                   {made: `team-data/pvc-[^/]+/`},
	"static.yaml":                   {existing: map[string]string{"reference-data": "reference/genomes/"}},
	"storageclass-bucket.yaml":      {made: `cluster-1-pvc-[^/]+/`},
	"storageclass.yaml":             {made: `team-data/default/pvc-[^/]+/`},
	"workload.yaml":                 {made: `team-data/research/pvc-[^/]+/`},
	"migrating/aws-mountpoint.yaml": {existing: map[string]string{"s3-pv": "team-data/some-s3-prefix/"}, driver: "s3.csi.aws.com", config: serviceOfDriver},
	"migrating/k8s-csi-s3.yaml": {
		existing: map[string]string{"csi-s3-pvc-data": "team-data/" + oldVolume + "/"}, made: `team-data/pvc-[^/]+/`,
		driver: "migrated.csi.driver", config: "migrating/config.yaml", // the installed one's default backend has keys of the driver's own
	},
	"migrating/k8s-csi-s3-in-place.yaml": {existing: map[string]string{oldVolume: "team-data/" + oldVolume + "/"}, driver: "ru.yandex.s3.csi",
		config: "migrating/config.yaml"},
}

// judgedOnly are the files of which the API server only judges the objects: their volumes are like those of the others.
var judgedOnly = []string{"checkpoints.yaml", "ci-cache.yaml", "logs.yaml", "model-serving.yaml", "pod-clients.yaml", "snapshots.yaml", "training-data.yaml"}

// oldVolume was made by k8s-csi-s3.
const oldVolume = "pvc-035763df-0488-4941-9a34-f637292eb95c"

// configs are the files that are the driver's config and hold no objects. They are values of the chart.
var configs = []string{"config.yaml", "declared-clients/config.yaml", "migrating/config.yaml"}

// serviceOfDriver stands for a config file: the S3 service, for a driver with keys of its own.
const serviceOfDriver = "driver"

// Every file below examples/ works, or is listed as one that has no objects.
func TestExamples(t *testing.T) {
	need(t)
	var files []string
	err := filepath.WalkDir(examplesDir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && filepath.Ext(path) != ".md" {
			path, err = filepath.Rel(examplesDir, path)
			files = append(files, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	known := slices.Sorted(slices.Values(slices.Concat(slices.Collect(maps.Keys(examples)), configs, judgedOnly)))
	if slices.Sort(files); !slices.Equal(files, known) {
		t.Fatalf("there is %q, and these are known: %q", files, known)
	}
	k, err := world.s3.AddUser(t.Context(), "examples", everything)
	if err != nil {
		t.Fatal(err)
	}
	replaced := map[string]bool{}
	for _, file := range configs {
		t.Run(file, func(t *testing.T) {
			judged(t, rendered(t, newNamespace(t), "--values", examplesDir+"/"+file), "")
		})
	}
	for _, file := range judgedOnly {
		t.Run(file, func(t *testing.T) {
			text := adapted(t, file, k, replaced)
			objectsOf(t, text)
			judged(t, text, "")
		})
	}
	for _, file := range slices.Sorted(maps.Keys(examples)) {
		t.Run(file, func(t *testing.T) {
			examples[file].try(t, adapted(t, file, k, replaced), func(config string) string {
				if config == serviceOfDriver {
					return driverValues(k)
				}
				return adapted(t, config, k, replaced) + "rbac: {secretNamespaces: [kube-system]}\n"
			})
		})
	}
	if t.Failed() {
		return
	}
	for old := range replacements(k) {
		if !replaced[old] {
			t.Errorf("no example has %q", old)
		}
	}
}

// replacements are what cannot be in this cluster as it is in the examples.
func replacements(k credentials.Keys) map[string]string {
	return map[string]string{
		"image: debian:12":                               "image: " + cluster.Busybox,
		"accessKeyID: AKIAEXAMPLE":                       "accessKeyID: " + k.AccessKeyID,
		"accessKeyID: YCAJEXAMPLE":                       "accessKeyID: " + k.AccessKeyID,
		"secretAccessKey: example":                       "secretAccessKey: " + k.SecretAccessKey,
		"endpoint: https://storage.yandexcloud.net":      "endpoint: http://s3.storage.svc:9000",
		"region: ru-central1":                            "region: " + s3server.DefaultRegion,
		"region us-west-2":                               "region " + s3server.DefaultRegion,
		"roleARN: arn:aws:iam::111122223333:role/s3csi/": "roleARN: arn:aws:iam::000000000000:role/s3csi/",
	}
}

func adapted(t *testing.T, file string, k credentials.Keys, replaced map[string]bool) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(examplesDir, file))
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	for old, now := range replacements(k) {
		if strings.Contains(text, old) {
			replaced[old] = true
			text = strings.ReplaceAll(text, old, now)
		}
	}
	return text
}

// driverValues let a driver work with keys of its own.
func driverValues(k credentials.Keys) string {
	return fmt.Sprintf(`
backends:
  default:
    endpoint: http://s3.storage.svc:9000
    region: %s
    sts: {endpoint: "http://s3.storage.svc:9001", kinds: [federationToken]}
driverCredentials: {secretName: own-keys, node: true}
secrets:
  - name: own-keys
    stringData: {accessKeyID: %q, secretAccessKey: %q}
`, s3server.DefaultRegion, k.AccessKeyID, k.SecretAccessKey)
}

// exampleObject is what has to be known of an object to use it.
type exampleObject struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
	Spec struct {
		StorageClassName *string  `json:"storageClassName"`
		AccessModes      []string `json:"accessModes"`
		VolumeName       string   `json:"volumeName"`
		ClaimRef         *struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"claimRef"`
		CSI struct {
			Attributes map[string]string `json:"volumeAttributes"`
		} `json:"csi"`
		Containers []struct {
			VolumeMounts []struct {
				MountPath string `json:"mountPath"`
			} `json:"volumeMounts"`
		} `json:"containers"`
		Volumes []struct {
			Claim struct {
				Name string `json:"claimName"`
			} `json:"persistentVolumeClaim"`
			CSI struct {
				ReadOnly bool `json:"readOnly"`
			} `json:"csi"`
		} `json:"volumes"`
	} `json:"spec"`
}

// namespace is where the object comes to be with kubectl apply and no more words.
func (o exampleObject) namespace() string {
	if o.Metadata.Namespace != "" {
		return o.Metadata.Namespace
	}
	return "default"
}

// consumer is a pod that has a volume of the example.
type consumer struct {
	namespace, name, path string
	volume                string // in existing; "": it is a new one
	readOnly              bool
}

// objectsOf parses an example and makes its namespaces, for as long as the test runs.
func objectsOf(t *testing.T, text string) (objects []exampleObject) {
	t.Helper()
	for doc := range strings.SplitSeq(text, "\n---\n") {
		var o exampleObject
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			t.Fatal(err)
		}
		objects = append(objects, o)
		if _, there := find(t, "namespace", "", o.namespace()); !there {
			apply(t, "", "apiVersion: v1\nkind: Namespace\nmetadata: {name: "+o.namespace()+"}")
			t.Cleanup(func() { remove(t, "namespace", "", o.namespace()) })
		}
	}
	return objects
}

func (e example) try(t *testing.T, text string, config func(string) string) {
	if e.driver != "" {
		text = strings.ReplaceAll(text, csiName, e.driver)
		secondRelease(t, e.driver, config(e.config))
	}
	for _, m := range regexp.MustCompile(`(?m)^\s+(?:bucketName|bucket): (\S+)`).FindAllStringSubmatch(text, -1) {
		namedBucket(t, m[1])
	}
	objects := objectsOf(t, text)
	for _, o := range objects {
		if o.Kind == "ServiceAccount" {
			e.role(t, o)
		}
	}
	for _, place := range e.existing {
		bucket, prefix, _ := strings.Cut(place, "/")
		put(t, bucket, prefix+"before", "was there")
	}

	t.Cleanup(func() {
		if t.Failed() {
			for _, ns := range []string{"default", "research", "storage"} {
				explain(t, ns)
			}
		}
		_, err := world.Kubectl(context.Background(), []byte(text), "delete", "-f", "-", "--ignore-not-found", "--timeout="+patience.String())
		if err != nil {
			t.Error(err)
		}
		volumesGone(t)
	})
	if _, warnings, err := shell(t.Context(), t, text, "kubectl apply --validate=strict -f -"); err != nil || warnings != "" {
		t.Fatalf("%v %s", err, warnings)
	}

	pods := e.consumers(t, objects)
	if len(pods) == 0 {
		t.Fatal("nothing of the example can be used")
	}
	t.Cleanup(func() { // by themselves they would take half a minute to end
		for _, p := range pods {
			kubectl(t, "delete", "pod", "-n", p.namespace, p.name, "--ignore-not-found", "--grace-period=1")
		}
	})
	for _, p := range pods {
		podReady(t, p.namespace, p.name)
		if p.volume != "" {
			if have := execute(t, p.namespace, p.name, "cat", p.path+"/before"); have != "was there" {
				t.Errorf("%s reads %q", p.name, have)
			}
		}
		if p.readOnly {
			if out, err := tryExecute(p.namespace, p.name, "touch", p.path+"/new"); err == nil || !strings.Contains(err.Error(), "Read-only file system") {
				t.Errorf("%s writes: %v %s", p.name, err, out)
			}
			continue
		}
		execute(t, p.namespace, p.name, "sh", "-c", "echo written > "+p.path+"/"+p.name+".txt")
		where := regexp.MustCompile("^" + e.made + regexp.QuoteMeta(p.name+".txt") + "$")
		if p.volume != "" {
			where = regexp.MustCompile("^" + regexp.QuoteMeta(e.existing[p.volume]+p.name+".txt") + "$")
		}
		eventually(t, "a file at "+where.String(), func() error {
			everywhere := objectsEverywhere(t)
			if !slices.ContainsFunc(everywhere, where.MatchString) {
				return fmt.Errorf("there is %q", everywhere)
			}
			return nil
		})
		execute(t, p.namespace, p.name, "rm", p.path+"/"+p.name+".txt") // a bucket is deleted when it is empty
	}
}

// role makes the role that the service account's pods take on.
func (e example) role(t *testing.T, account exampleObject) {
	t.Helper()
	name := account.namespace() + "." + account.Metadata.Name
	_, err := world.s3.SetRole(t.Context(), s3server.Role{Name: "s3csi/" + name, Policy: everything, Trust: s3server.Trust{Issuers: []s3server.TrustedIssuer{{
		URL: world.issuer.URL(), Audiences: []string{audience}, Subjects: []string{"system:serviceaccount:" + strings.Replace(name, ".", ":", 1)},
	}}}})
	if err != nil {
		t.Fatal(err)
	}
}

// consumers are the pods of the example, and further ones for what none of them uses: claims, PersistentVolumes, StorageClasses.
func (e example) consumers(t *testing.T, objects []exampleObject) []consumer {
	t.Helper()
	var pods []consumer
	used := map[string]bool{} // "kind name"
	run := func(namespace, claim, volume string, readOnly bool) {
		bound(t, namespace, claim)
		name := "uses-" + claim
		podSpec{name: name, claims: map[string]string{"/v": claim}}.run(t, namespace)
		t.Cleanup(func() { remove(t, "pod", namespace, name) })
		pods = append(pods, consumer{namespace, name, "/v", volume, readOnly})
	}
	of := func(kind string) (all []exampleObject) {
		for _, o := range objects {
			if o.Kind == kind && !used[kind+" "+o.Metadata.Name] {
				all = append(all, o)
			}
		}
		return all
	}
	claims := map[string]exampleObject{}
	for _, o := range of("PersistentVolumeClaim") {
		claims[o.Metadata.Name] = o
		used["PersistentVolume "+o.Spec.VolumeName] = true
		if c := o.Spec.StorageClassName; c != nil {
			used["StorageClass "+*c] = true
		}
	}
	for _, o := range of("Pod") {
		source := o.Spec.Volumes[0]
		p := consumer{namespace: o.namespace(), name: o.Metadata.Name, path: o.Spec.Containers[0].VolumeMounts[0].MountPath, readOnly: source.CSI.ReadOnly}
		if p.volume = o.Metadata.Name; source.Claim.Name != "" {
			p.volume = claims[source.Claim.Name].Spec.VolumeName
			used["PersistentVolumeClaim "+source.Claim.Name] = true
		}
		pods = append(pods, p)
	}
	readOnly := map[string]bool{}
	for _, o := range objects {
		readOnly[o.Metadata.Name] = o.Kind == "PersistentVolume" && o.Spec.CSI.Attributes["readOnly"] == "true"
	}
	for _, o := range of("PersistentVolumeClaim") {
		run(o.namespace(), o.Metadata.Name, o.Spec.VolumeName, readOnly[o.Spec.VolumeName])
	}
	for _, o := range of("PersistentVolume") {
		namespace, name := "default", o.Metadata.Name
		if ref := o.Spec.ClaimRef; ref != nil {
			namespace, name = ref.Namespace, ref.Name
		}
		apply(t, namespace, fmt.Sprintf("{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: %s}, spec: {storageClassName: %q, volumeName: %s, "+
			"accessModes: %q, resources: {requests: {storage: 1Gi}}}}",
			name, *o.Spec.StorageClassName, o.Metadata.Name, o.Spec.AccessModes))
		t.Cleanup(func() { remove(t, "pvc", namespace, name) })
		used["StorageClass "+*o.Spec.StorageClassName] = true
		run(namespace, name, o.Metadata.Name, readOnly[o.Metadata.Name])
	}
	for _, o := range of("StorageClass") {
		name := "of-" + o.Metadata.Name
		claim(t, "default", name, o.Metadata.Name, "ReadWriteMany")
		t.Cleanup(func() { remove(t, "pvc", "default", name) })
		run("default", name, "", false)
	}
	return pods
}

// objectsEverywhere are all objects of the S3 service, as bucket/key.
func objectsEverywhere(t *testing.T) []string {
	t.Helper()
	buckets, err := storage(t).ListBuckets(t.Context(), &s3.ListBucketsInput{})
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, b := range buckets.Buckets {
		for _, key := range keys(t, *b.Name, "") {
			all = append(all, *b.Name+"/"+key)
		}
	}
	return all
}
