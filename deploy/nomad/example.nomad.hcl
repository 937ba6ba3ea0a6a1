# nomad job run example.nomad.hcl
# A job that uses the volume of volume.hcl.

job "writer" {
  group "writer" {
    volume "data" {
      type            = "csi"
      source          = "data"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
    }

    task "writer" {
      driver = "docker"

      volume_mount {
        volume      = "data"
        destination = "/data"
      }

      config {
        image   = "busybox:1"
        command = "/bin/sh"
        args    = ["-c", "date >> /data/log; sleep 3600"]
      }
    }
  }
}
