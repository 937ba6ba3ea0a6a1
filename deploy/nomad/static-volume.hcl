# nomad volume register static-volume.hcl
# Data that is there already. End it with `nomad volume deregister`, which leaves the data alone.

id          = "reference"
name        = "reference"
type        = "csi"
plugin_id   = "s3"
external_id = "reference-data" # any name without ":"

capability {
  access_mode     = "multi-node-reader-only"
  attachment_mode = "file-system"
}

context {
  bucketName = "team-data"
  prefix     = "reference/"
  readOnly   = "true"
}
