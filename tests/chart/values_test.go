package chart

import (
	"testing"
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
sidecars:
  provisioner: {extraArgs: [--v=3]}
  resizer: {enabled: true, extraArgs: [--v=4]}
  nodeDriverRegistrar: {extraArgs: [--v=5]}
  livenessProbe: {extraArgs: [--v=6]}
`)...)
	want := map[string]string{
		"controller/s3-csi-driver": "--v=1", "node/s3-csi-driver": "--v=2", "controller/csi-provisioner": "--v=3", "controller/csi-resizer": "--v=4",
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
