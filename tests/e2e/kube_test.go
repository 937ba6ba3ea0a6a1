package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"sigs.k8s.io/yaml"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// Bounds of waiting. They are for a machine that is busy with other things as well.
const (
	patience = 2 * time.Minute
	polling  = 100 * time.Millisecond
)

// object is any object of the API.
type object struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name              string            `json:"name"`
		Namespace         string            `json:"namespace"`
		UID               string            `json:"uid"`
		Labels            map[string]string `json:"labels"`
		DeletionTimestamp string            `json:"deletionTimestamp"`
		Finalizers        []string          `json:"finalizers"`
	} `json:"metadata"`
	Spec struct {
		VolumeName                    string `json:"volumeName"`
		PersistentVolumeReclaimPolicy string `json:"persistentVolumeReclaimPolicy"`
		CSI                           struct {
			VolumeHandle     string            `json:"volumeHandle"`
			VolumeAttributes map[string]string `json:"volumeAttributes"`
		} `json:"csi"`
		Drivers []struct {
			Name string `json:"name"`
		} `json:"drivers"`
		Containers []struct {
			Name    string   `json:"name"`
			Command []string `json:"command"`
		} `json:"containers"`
	} `json:"spec"`
	Status struct {
		Phase      string `json:"phase"`
		ReadyToUse bool   `json:"readyToUse"` // of a snapshot
		Content    string `json:"boundVolumeSnapshotContentName"`
		Handle     string `json:"snapshotHandle"`
		PodIP      string `json:"podIP"`
		Reason     string `json:"reason"`
		Conditions []struct {
			Type, Status string
		} `json:"conditions"`
		ContainerStatuses     []containerStatus `json:"containerStatuses"`
		InitContainerStatuses []containerStatus `json:"initContainerStatuses"`
	} `json:"status"`
	Reason        string `json:"reason"`        // of an event
	Message       string `json:"message"`       // of an event
	LastTimestamp string `json:"lastTimestamp"` // of an event, in RFC 3339
	Items         []object
}

// containerStatus is that of a pod's container.
type containerStatus struct {
	Name         string `json:"name"`
	Ready        bool   `json:"ready"`
	RestartCount int    `json:"restartCount"`
	ContainerID  string `json:"containerID"`
	State        struct {
		Terminated *struct {
			ExitCode int `json:"exitCode"`
		} `json:"terminated"`
		Waiting *struct {
			Reason, Message string
		} `json:"waiting"`
	} `json:"state"`
}

// ready reports whether a pod is.
func (o object) ready() bool {
	for _, c := range o.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}

// need skips a test that has no cluster.
func need(t testing.TB) {
	t.Helper()
	if world.unusable != "" {
		t.Skip(world.unusable)
	}
}

var namespaces atomic.Int64

// newNamespace makes a namespace for a test. It goes with all that is in it, which is waited for, so that a volume that cannot be
// unmounted or deleted fails the test that made it.
func newNamespace(t testing.TB) string {
	t.Helper()
	need(t)
	name := fmt.Sprintf("%s-%d", strings.Trim(regexp.MustCompile(`[^a-z0-9]+`).ReplaceAllString(strings.ToLower(t.Name()), "-"), "-"), namespaces.Add(1))
	if len(name) > 60 {
		name = name[len(name)-60:]
	}
	name = strings.Trim(name, "-")
	apply(t, "", "apiVersion: v1\nkind: Namespace\nmetadata: {name: "+name+"}")
	t.Cleanup(func() { remove(t, "namespace", "", name) }) // also if something in it stays
	t.Cleanup(func() {
		if t.Failed() {
			explain(t, name)
		}
		clearNamespace(t, name)
	})
	return name
}

// clearNamespace removes what takes time in a namespace. Kubernetes would look for it with pauses of up to a minute.
func clearNamespace(t testing.TB, name string) {
	t.Helper()
	for _, kind := range []string{"statefulsets", "deployments", "daemonsets", "jobs"} {
		removeAll(t, kind, name)
	}
	for _, kind := range []string{"pods", "volumesnapshots", "persistentvolumeclaims"} {
		eventually(t, kind+" in "+name+" to be gone", func() error {
			left, err := ask(t, kind, name, "", nil)
			if errors.Is(err, cluster.ErrNotFound) { // no such kind
				return nil
			}
			if err != nil || len(left.Items) == 0 {
				return err
			}
			if slices.ContainsFunc(left.Items, func(o object) bool { return o.Metadata.DeletionTimestamp == "" }) {
				removeAll(t, kind, name)
			}
			return fmt.Errorf("%d are there, %s with finalizers %q", len(left.Items), left.Items[0].Metadata.Name, left.Items[0].Metadata.Finalizers)
		})
	}
}

// removeAll asks for the removal of all objects of a kind in a namespace.
func removeAll(t testing.TB, kind, namespace string) {
	t.Helper()
	path, _ := resource(kind, namespace, "")
	if err := world.Delete(context.Background(), path); err != nil && !errors.Is(err, cluster.ErrNotFound) {
		t.Fatal(err)
	}
}

// explain shows what there is to see of a namespace in which something went wrong.
func explain(t testing.TB, namespace string) {
	t.Helper()
	for _, args := range [][]string{
		{"get", "pods,pvc", "-n", namespace, "-o", "wide"},
		{"get", "events", "-n", namespace, "--sort-by=.lastTimestamp"},
	} {
		out, err := world.Kubectl(context.Background(), nil, args...)
		t.Logf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	t.Logf("the node's driver:\n%s", driverLog(t, 40))
	names, err := try("get", "pods,pvc", "-n", namespace, "-o", "jsonpath={.items[*].metadata.uid} {.items[*].spec.volumeName}")
	t.Logf("what it said earlier of the pods and volumes of namespace %s: %v\n%s", namespace, err,
		strings.Join(about(driverLog(t, -1), strings.Fields(names)), "\n"))
}

// about returns the last lines of a log that contain one of the names, or are about a mount of which another such line is.
func about(log string, names []string) []string {
	has := func(line string) bool {
		return slices.ContainsFunc(names, func(name string) bool { return strings.Contains(line, name) })
	}
	mount := regexp.MustCompile(` mount="[^"]+"`)
	for line := range strings.Lines(log) {
		if m := mount.FindString(line); m != "" && has(line) && !slices.Contains(names, m) {
			names = append(names, m)
		}
	}
	lines := slices.DeleteFunc(strings.Split(log, "\n"), func(line string) bool { return !has(line) })
	return lines[max(0, len(lines)-100):]
}

// driverLog is the end of what the driver on the node said. Flags are those of kubectl logs.
func driverLog(t testing.TB, lines int, flags ...string) string {
	t.Helper()
	out, err := try(append([]string{"logs", "-n", driverNamespace, "daemonset/" + release + "-node", "-c", "s3-csi-driver", fmt.Sprintf("--tail=%d", lines)},
		flags...)...)
	if err != nil {
		return err.Error()
	}
	return out
}

// kubectl runs kubectl, which must succeed.
func kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := world.Kubectl(t.Context(), nil, args...)
	if errors.Is(err, context.Canceled) { // in a cleanup, where the test's context has ended
		out, err = world.Kubectl(context.Background(), nil, args...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// try runs kubectl, which may fail.
func try(args ...string) (string, error) {
	return world.Kubectl(context.Background(), nil, args...)
}

// apply applies objects in a namespace. Those of the kinds in resources are made without kubectl, which costs more than all else that making an
// object does.
func apply(t testing.TB, namespace, objects string) {
	t.Helper()
	for text := range strings.SplitSeq(objects, "\n---") {
		if strings.TrimSpace(text) == "" {
			continue
		}
		var o struct {
			Kind     string `json:"kind"`
			Metadata struct {
				Namespace string `json:"namespace"`
			} `json:"metadata"`
		}
		if err := yaml.Unmarshal([]byte(text), &o); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		within := cmp.Or(o.Metadata.Namespace, namespace)
		if path, _ := resource(o.Kind, within, ""); path != "" {
			if err := world.Create(context.Background(), path, text); err == nil {
				continue
			} else if !errors.Is(err, cluster.ErrExists) {
				t.Fatalf("%v\n%s", err, text)
			}
		}
		args := []string{"apply", "-f", "-"}
		if within != "" {
			args = append(args, "-n", within)
		}
		if _, err := world.Kubectl(context.Background(), []byte(text), args...); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
	}
}

// remove removes an object and waits until it is gone.
func remove(t testing.TB, kind, namespace, name string) {
	t.Helper()
	path, known := resource(kind, namespace, name)
	if !known {
		args := []string{"delete", kind, name, "--ignore-not-found", "--timeout=" + patience.String()}
		if namespace != "" {
			args = append(args, "-n", namespace)
		}
		kubectl(t, args...)
		return
	}
	uid := ""
	if o, ok := find(t, kind, namespace, name); ok {
		uid = o.Metadata.UID
	}
	if err := world.Delete(context.Background(), path); err != nil && !errors.Is(err, cluster.ErrNotFound) {
		t.Fatal(err)
	}
	eventually(t, kind+" "+namespace+"/"+name+" to be gone", func() error {
		if o, ok := find(t, kind, namespace, name); ok && o.Metadata.UID == uid {
			return fmt.Errorf("it is there, with finalizers %q", o.Metadata.Finalizers)
		}
		return nil
	})
}

// resources are where the API server has objects of a kind; kubectl's short names count too.
func resources(kind string) (path string, namespaced bool) {
	for _, r := range []struct {
		names      string
		group      string
		namespaced bool
	}{
		{"pods pod", "/api/v1", true},
		{"persistentvolumeclaims persistentvolumeclaim pvc", "/api/v1", true},
		{"events event", "/api/v1", true},
		{"secrets secret", "/api/v1", true},
		{"configmaps configmap", "/api/v1", true},
		{"serviceaccounts serviceaccount", "/api/v1", true},
		{"namespaces namespace ns", "/api/v1", false},
		{"nodes node", "/api/v1", false},
		{"persistentvolumes persistentvolume pv", "/api/v1", false},
		{"volumesnapshots volumesnapshot", "/apis/snapshot.storage.k8s.io/v1", true},
		{"volumesnapshotcontents volumesnapshotcontent", "/apis/snapshot.storage.k8s.io/v1", false},
		{"volumesnapshotclasses volumesnapshotclass", "/apis/snapshot.storage.k8s.io/v1", false},
		{"volumeattributesclasses volumeattributesclass", "/apis/storage.k8s.io/v1", false},
		{"storageclasses storageclass sc", "/apis/storage.k8s.io/v1", false},
		{"csinodes csinode", "/apis/storage.k8s.io/v1", false},
		{"csidrivers csidriver", "/apis/storage.k8s.io/v1", false},
		{"daemonsets daemonset ds", "/apis/apps/v1", true},
		{"deployments deployment deploy", "/apis/apps/v1", true},
		{"statefulsets statefulset sts", "/apis/apps/v1", true},
		{"jobs job", "/apis/batch/v1", true},
	} {
		if names := strings.Fields(r.names); slices.Contains(names, kind) {
			return r.group + "/%s" + names[0], r.namespaced
		}
	}
	return "", false
}

// resource is where the API server has an object of a kind, or all of the kind in a namespace.
func resource(kind, namespace, name string) (path string, known bool) {
	path, namespaced := resources(strings.ToLower(kind))
	if path == "" {
		return "", false
	}
	within := ""
	if namespaced && namespace != "" {
		within = "namespaces/" + namespace + "/"
	}
	path = fmt.Sprintf(path, within)
	if name != "" {
		path += "/" + name
	}
	return path, true
}

// ask asks the API server for an object, or for all of a kind.
func ask(t testing.TB, kind, namespace, name string, query url.Values) (object, error) {
	t.Helper()
	path, known := resource(kind, namespace, name)
	if !known {
		t.Fatalf("where are objects of kind %s? Add it to resources", kind)
	}
	body, err := world.Get(context.Background(), path+"?"+query.Encode())
	if err != nil {
		return object{}, err
	}
	return decode(t, string(body)), nil
}

// find is an object, if it is there.
func find(t testing.TB, kind, namespace, name string) (object, bool) {
	t.Helper()
	o, err := ask(t, kind, namespace, name, nil)
	if err != nil && !errors.Is(err, cluster.ErrNotFound) {
		t.Fatal(err)
	}
	return o, err == nil
}

// get is an object, which must be there.
func get(t testing.TB, kind, namespace, name string) object {
	t.Helper()
	o, ok := find(t, kind, namespace, name)
	if !ok {
		t.Fatalf("there is no %s %s/%s", kind, namespace, name)
	}
	return o
}

// list are the objects of a kind, of all namespaces where none is named. Selectors are those of kubectl:
// "--field-selector=…", "--selector=…" and "-l …".
func list(t testing.TB, kind, namespace string, selectors ...string) []object {
	t.Helper()
	query := url.Values{}
	for len(selectors) > 0 {
		name, value, given := strings.Cut(strings.TrimLeft(selectors[0], "-"), "=")
		if selectors = selectors[1:]; !given && len(selectors) > 0 {
			value, selectors = selectors[0], selectors[1:]
		}
		switch name {
		case "field-selector":
			query.Set("fieldSelector", value)
		case "selector", "l":
			query.Set("labelSelector", value)
		default:
			t.Fatalf("%q is no selector", name)
		}
	}
	o, err := ask(t, kind, namespace, "", query)
	if err != nil {
		t.Fatal(err)
	}
	return o.Items
}

func decode(t testing.TB, text string) object {
	t.Helper()
	var o object
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return o
}

// eventually tries until there is no error, for as long as patience lasts.
func eventually(t testing.TB, what string, try func() error) {
	t.Helper()
	within(t, patience, what, try)
}

// within tries until there is no error, for so long. Time for which the machine keeps all from running does not count.
func within(t testing.TB, d time.Duration, what string, try func() error) {
	t.Helper()
	var err error
	for began := pressure.Now(); began.Since() < d; {
		if err = try(); err == nil {
			return
		}
		// What takes long is looked at less often: the API server has most of the work of these tests.
		time.Sleep(min(max(time.Since(began.Time)/15, polling), time.Second))
	}
	t.Fatalf("waited %s for %s: %v", d, what, err)
}

// execute runs a command in a pod, which must succeed, and gives what it says.
func execute(t testing.TB, namespace, pod string, argv ...string) string {
	t.Helper()
	out, err := tryExecute(namespace, pod, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// tryExecute runs a command in a pod, which may fail.
func tryExecute(namespace, pod string, argv ...string) (string, error) {
	return try(append([]string{"exec", "-n", namespace, pod, "--"}, argv...)...)
}

// forever is what a shell's command ends with whose container is to live on.
const forever = "exec sleep 1000000"

// podReady waits until a pod is, and has done what its shells do before they sleep: for kubelet it is ready when it has begun.
func podReady(t testing.TB, namespace, name string) object {
	t.Helper()
	var o object
	eventually(t, "pod "+namespace+"/"+name+" to be ready", func() error {
		if o = get(t, "pod", namespace, name); !o.ready() {
			return fmt.Errorf("it is %s %s; %s", o.Status.Phase, o.Status.Reason, lastEvent(t, namespace, name))
		}
		for _, c := range o.Spec.Containers {
			if len(c.Command) == 0 || !strings.HasSuffix(c.Command[len(c.Command)-1], "&& "+forever) {
				continue
			}
			i := slices.IndexFunc(o.Status.ContainerStatuses, func(s containerStatus) bool { return s.Name == c.Name })
			if i < 0 {
				return fmt.Errorf("its container %s has no status", c.Name)
			}
			if all := containerProcesses(o.Status.ContainerStatuses[i].ContainerID); len(all) != 1 || all[0].name != "sleep" {
				return fmt.Errorf("its container %s is not done: there are %v", c.Name, all)
			}
		}
		return nil
	})
	return o
}

// lastEvent is what was said last about an object.
func lastEvent(t testing.TB, namespace, name string) string {
	t.Helper()
	last := object{Reason: "no events"}
	for _, e := range list(t, "events", namespace, "--field-selector=involvedObject.name="+name) {
		if e.LastTimestamp >= last.LastTimestamp {
			last = e
		}
	}
	return last.Reason + ": " + last.Message
}

// event waits for an event about an object that says all of that.
func event(t testing.TB, namespace, name string, words ...string) string {
	t.Helper()
	found := ""
	eventually(t, fmt.Sprintf("an event about %s that says %q", name, words), func() error {
		var seen []string
		for _, e := range list(t, "events", namespace, "--field-selector=involvedObject.name="+name) {
			seen = append(seen, e.Message)
			missing := false
			for _, w := range words {
				missing = missing || !strings.Contains(e.Message, w)
			}
			if !missing {
				found = e.Message
				return nil
			}
		}
		return fmt.Errorf("there are %q", seen)
	})
	return found
}

// bound waits until a claim is bound, and gives its volume.
func bound(t testing.TB, namespace, claim string) object {
	t.Helper()
	var o object
	eventually(t, "claim "+namespace+"/"+claim+" to be bound", func() error {
		if o = get(t, "pvc", namespace, claim); o.Status.Phase == "Bound" {
			return nil
		}
		return fmt.Errorf("it is %s; %s", o.Status.Phase, lastEvent(t, namespace, claim))
	})
	return get(t, "pv", "", o.Spec.VolumeName)
}

// class makes a StorageClass of the test's own; parameters are lines of YAML.
func class(t testing.TB, parameters map[string]string, more ...string) string {
	t.Helper()
	name := fmt.Sprintf("e2e-%d", namespaces.Add(1))
	body, err := json.Marshal(map[string]any{
		"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": map[string]any{"name": name}, "provisioner": csiName, "parameters": parameters,
	})
	if err != nil {
		t.Fatal(err)
	}
	apply(t, "", strings.TrimSuffix(string(body), "}")+strings.Join(append([]string{""}, more...), ", ")+"}")
	t.Cleanup(func() { remove(t, "storageclass", "", name) })
	return name
}

// claim makes a claim of a class.
func claim(t testing.TB, namespace, name, class, mode string) {
	t.Helper()
	apply(t, namespace, fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s}
spec:
  storageClassName: %q
  accessModes: [%s]
  resources: {requests: {storage: 1Gi}}`, name, class, mode))
}

// podSpec is a pod with a shell and volumes of claims.
type podSpec struct {
	name    string
	claims  map[string]string // by the path where the container has it
	command string            // of the shell; "": it sleeps
	pod     string            // further fields of the pod's spec, as YAML in flow style: "securityContext: {runAsUser: 1000}"
	mount   string            // further fields of each volumeMount: "readOnly: true"
	source  string            // further fields of each claim's volume source
	more    string            // further fields of the container
}

func (p podSpec) yaml() string {
	var mounts, volumes []string
	for _, path := range slices.Sorted(maps.Keys(p.claims)) {
		name := p.claims[path]
		mounts = append(mounts, "{"+join("name: "+name, "mountPath: "+path, p.mount)+"}")
		volumes = append(volumes, "{"+join("name: "+name, "persistentVolumeClaim: {"+join("claimName: "+name, p.source)+"}")+"}")
	}
	command := p.command
	if command == "" {
		command = forever
	}
	script, _ := json.Marshal(command)
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec: {%s}`, p.name, join("terminationGracePeriodSeconds: 1", p.pod,
		"containers: [{"+join("name: c", "image: "+cluster.Busybox, "command: [sh, -c, "+string(script)+"]", "volumeMounts: ["+strings.Join(mounts, ", ")+"]",
			p.more)+"}]",
		"volumes: ["+strings.Join(volumes, ", ")+"]"))
}

func join(parts ...string) string {
	var all []string
	for _, p := range parts {
		if p != "" {
			all = append(all, p)
		}
	}
	return strings.Join(all, ", ")
}

// run starts a pod and waits until it is ready.
func (p podSpec) run(t testing.TB, namespace string) object {
	t.Helper()
	apply(t, namespace, p.yaml())
	return podReady(t, namespace, p.name)
}

// bucket makes a bucket of the test's own. It goes with what is in it.
func bucket(t testing.TB) string {
	t.Helper()
	need(t)
	name := fmt.Sprintf("e2e-%d-%d", os.Getpid(), namespaces.Add(1))
	c := storage(t)
	if _, err := c.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: &name}); err != nil {
		t.Fatal(err)
	}
	return name
}

// storage is the S3 service, with the keys of its root.
func storage(t testing.TB) *s3.Client {
	t.Helper()
	k := world.s3.Keys()
	return s3.New(s3.Options{
		BaseEndpoint: aws.String(world.s3.Endpoint()), Region: s3server.DefaultRegion, UsePathStyle: true,
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: k.AccessKeyID, SecretAccessKey: k.SecretAccessKey}, nil
		}),
	})
}

// keys are the objects of a bucket below a prefix.
func keys(t testing.TB, bucket, prefix string) []string {
	t.Helper()
	var all []string
	pages := s3.NewListObjectsV2Paginator(storage(t), &s3.ListObjectsV2Input{Bucket: &bucket, Prefix: &prefix})
	for pages.HasMorePages() {
		page, err := pages.NextPage(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range page.Contents {
			all = append(all, *o.Key)
		}
	}
	return all
}

// content is an object's.
func content(t testing.TB, bucket, key string) string {
	t.Helper()
	out, err := storage(t).GetObject(context.Background(), &s3.GetObjectInput{Bucket: &bucket, Key: &key})
	if err != nil {
		t.Fatal(err)
	}
	defer out.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(out.Body); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// put writes an object.
func put(t testing.TB, bucket, key, content string) {
	t.Helper()
	_, err := storage(t).PutObject(context.Background(), &s3.PutObjectInput{Bucket: &bucket, Key: &key, Body: strings.NewReader(content)})
	if err != nil {
		t.Fatal(err)
	}
}

// place is where a volume of this driver is.
func place(t testing.TB, volume object) (bucket, prefix string) {
	t.Helper()
	_, rest, _ := strings.Cut(volume.Spec.CSI.VolumeHandle, ":")
	bucket, prefix, _ = strings.Cut(rest, "/")
	return bucket, prefix
}

// namedBucket makes a bucket that has to have this name, if it is not there.
func namedBucket(t testing.TB, name string) {
	t.Helper()
	_, err := storage(t).CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: &name})
	if err != nil {
		if _, ok := errors.AsType[*types.BucketAlreadyOwnedByYou](err); !ok {
			t.Fatal(err)
		}
	}
}

// stored waits until an object holds that.
func stored(t testing.TB, bucket, key, want string) {
	t.Helper()
	eventually(t, key+" in bucket "+bucket, func() error {
		if all := keys(t, bucket, key); !slices.Contains(all, key) {
			return fmt.Errorf("there is %q", keys(t, bucket, ""))
		}
		if have := content(t, bucket, key); have != want {
			return fmt.Errorf("it holds %q", have)
		}
		return nil
	})
}

// volumesGone waits until every volume is gone that goes with its claim or is deleted, or each in one of those buckets.
func volumesGone(t testing.TB, buckets ...string) {
	t.Helper()
	eventually(t, "the volumes to be gone that go with their claims or are deleted", func() error {
		for _, v := range list(t, "persistentvolumes", "") {
			if b, _ := place(t, v); len(buckets) > 0 && !slices.Contains(buckets, b) {
				continue
			}
			if v.Spec.PersistentVolumeReclaimPolicy == "Delete" || v.Metadata.DeletionTimestamp != "" {
				return fmt.Errorf("%s is %s; %s", v.Metadata.Name, v.Status.Phase, lastEvent(t, "default", v.Metadata.Name))
			}
		}
		return nil
	})
}
