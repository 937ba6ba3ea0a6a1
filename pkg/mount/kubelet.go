package mount

import "strings"

// KubeletTarget returns what kubelet's target paths contain: <root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount.
func KubeletTarget(target string) (podUID, volume string) {
	parts := strings.Split(target, "/")
	n := len(parts)
	if n < 7 || parts[n-6] != "pods" || parts[n-4] != "volumes" || parts[n-3] != "kubernetes.io~csi" || parts[n-1] != "mount" {
		return "", ""
	}
	return parts[n-5], parts[n-2]
}

// IsInlineHandle reports whether a handle is one that kubelet makes for inline volumes: "csi-" and a hash.
func IsInlineHandle(handle string) bool {
	hash, ok := strings.CutPrefix(handle, "csi-")
	return ok && len(hash) == 64 && strings.Trim(hash, "0123456789abcdef") == ""
}
