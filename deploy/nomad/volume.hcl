# nomad volume create volume.hcl
# A prefix of the bucket team-data becomes the volume.

id        = "data"
name      = "data" # the prefix has this name: use names that are unique in all namespaces of Nomad
type      = "csi"
plugin_id = "s3"

capability {
  access_mode     = "multi-node-multi-writer"
  attachment_mode = "file-system"
}

parameters {
  bucketName = "team-data"
  client     = "rclone"       # named here, so that mistakes in mount_flags are found now
  onDelete   = "requireEmpty" # `nomad volume delete` deletes nothing while there are files
}
