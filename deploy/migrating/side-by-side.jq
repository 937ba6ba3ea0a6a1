# Makes a second PersistentVolume and claim for each static volume of the AWS Mountpoint driver, for the same data with this driver:
#
#   kubectl get pv -o json | jq -f side-by-side.jq > volumes.json
#
# Read docs/how-to/migrating-aws.md first. Names end with "-s3csi". Nothing of the old objects is changed. Volumes that forbid deleting or
# overwriting files by not allowing it keep doing so.
def named($option): any(.[]; test("^(--)?" + $option + "([ =]|$)"));
def guarded:
  . + (if named("allow-delete") then [] else ["allow-delete=false"] end)
    + (if named("allow-overwrite") then [] else ["allow-overwrite=false"] end);

{
  apiVersion: "v1",
  kind: "List",
  items: [
    .items[] | select(.spec.csi.driver == "s3.csi.aws.com" and .spec.claimRef != null) |
    (.metadata.name + "-s3csi") as $volume | (.spec.claimRef.name + "-s3csi") as $claim |
    {
      apiVersion: "v1",
      kind: "PersistentVolume",
      metadata: {name: $volume},
      spec: {
        capacity: .spec.capacity,
        accessModes: .spec.accessModes,
        storageClassName: "",
        persistentVolumeReclaimPolicy: "Retain",
        claimRef: {namespace: .spec.claimRef.namespace, name: $claim},
        mountOptions: ((.spec.mountOptions // []) | guarded),
        csi: (.spec.csi | {
          driver: "s3.csi.driver",
          volumeHandle: (.volumeHandle + "-s3csi"),
          readOnly: (.readOnly // false),
          volumeAttributes: .volumeAttributes
        } + if .nodePublishSecretRef then {nodePublishSecretRef: .nodePublishSecretRef} else {} end)
      }
    },
    {
      apiVersion: "v1",
      kind: "PersistentVolumeClaim",
      metadata: {namespace: .spec.claimRef.namespace, name: $claim},
      spec: {accessModes: .spec.accessModes, storageClassName: "", resources: {requests: .spec.capacity}, volumeName: $volume}
    }
  ]
}
