package rig

import "os"

// initialPIDNamespace is what /proc/self/ns/pid is in the machine's first PID namespace (PROC_PID_INIT_INO of include/linux/proc_ns.h).
const initialPIDNamespace = "pid:[4026531836]"

// Isolated reports whether this process is in a PID namespace of its own, where a driver refuses to publish volumes unless it has
// --allow-isolated.
func Isolated() bool {
	namespace, err := os.Readlink("/proc/self/ns/pid")
	return err != nil || namespace != initialPIDNamespace
}

// IsolationFlags are the flags that a node's driver, started by this process, needs to publish volumes.
func IsolationFlags() []string {
	if Isolated() {
		return []string{"--allow-isolated"}
	}
	return nil
}
