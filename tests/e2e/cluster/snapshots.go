package cluster

// snapshotController runs the snapshot controller with the permissions that its project gives it.
const snapshotController = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: snapshot-controller, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: snapshot-controller}
rules:
- {apiGroups: [""], resources: [persistentvolumes], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [persistentvolumeclaims], verbs: [get, list, watch, update]}
- {apiGroups: [""], resources: [events], verbs: [list, watch, create, update, patch]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshotclasses], verbs: [get, list, watch]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshotcontents], verbs: [create, get, list, watch, update, delete, patch]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshotcontents/status], verbs: [patch]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshots], verbs: [create, get, list, watch, update, patch, delete]}
- {apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshots/status], verbs: [update, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: snapshot-controller}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: snapshot-controller}
subjects: [{kind: ServiceAccount, name: snapshot-controller, namespace: kube-system}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: snapshot-controller, namespace: kube-system}
spec:
  selector: {matchLabels: {app: snapshot-controller}}
  template:
    metadata: {labels: {app: snapshot-controller}}
    spec:
      serviceAccountName: snapshot-controller
      priorityClassName: system-cluster-critical
      containers:
      - name: snapshot-controller
        image: cluster.local/snapshot-controller:1
        # With its default of five requests a second, it sees changes of VolumeSnapshotContents late in a run of many tests. A content whose policy
        # becomes Delete just before its VolumeSnapshot is deleted, as in tests of the policy Retain, then stays.
        args: [--v=2, --kube-api-qps=100, --kube-api-burst=200]
`
