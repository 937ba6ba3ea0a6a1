// Package containers runs real containers with runc, as the runtime of a kubelet does: in namespaces and a cgroup of their
// own, with bind mounts of volumes, and a process in them that says how reads and writes go (tests/cmd/container-agent).
package containers
