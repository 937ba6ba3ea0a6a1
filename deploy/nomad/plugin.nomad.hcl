# The driver as a plugin on every Nomad client: controller and node in one task. See docs/how-to/nomad.md.
#
# Replace: the image, /opt/nomad/data by the data_dir of your clients (in two places), and the backend.
# The Docker driver of each client needs allow_privileged = true.

job "s3-csi" {
  type = "system"

  group "plugin" {
    restart {
      attempts = 10
      interval = "5m"
      delay    = "5s"
      mode     = "delay" # the default gives up after two attempts
    }

    task "driver" {
      driver       = "docker"
      kill_timeout = "30s"

      config {
        image        = "registry.example.com/s3-csi-driver:1"
        privileged   = true
        pid_mode     = "host" # or the driver publishes nothing
        network_mode = "host" # or mounts lose their network with the task
        args = [
          "all",
          "--node-id=${node.unique.name}",
          "--default-client=rclone",
          "--target-root=/opt/nomad/data/client/csi",
          "--http-endpoint=127.0.0.1:9810",
          "--config=/local/backends.yaml",
        ]
      }

      csi_plugin {
        id        = "s3"
        type      = "monolith"
        mount_dir = "/csi"
        # <data_dir>/client/csi/<type>/<id>: the driver mounts on the host, so Nomad must send paths of the host.
        stage_publish_base_dir = "/opt/nomad/data/client/csi/monolith/s3"
      }

      template {
        destination = "local/backends.yaml"
        change_mode = "noop" # the driver reads the file again
        data        = <<YAML
backends:
  default:
    endpoint: http://127.0.0.1:9000
    region: us-east-1
YAML
      }

      # nomad var put nomad/jobs/s3-csi access_key_id=… secret_access_key=…
      template {
        destination = "secrets/s3.env"
        env         = true
        data        = <<ENV
{{ with nomadVar "nomad/jobs/s3-csi" }}
AWS_ACCESS_KEY_ID={{ .access_key_id }}
AWS_SECRET_ACCESS_KEY={{ .secret_access_key }}
{{ end }}
ENV
      }

      resources {
        cpu    = 100
        memory = 256
      }
    }
  }
}
