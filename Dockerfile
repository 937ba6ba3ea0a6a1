# The driver, its helper and its clients, which are linked statically, and certificates. The directory that it is built from has a directory for
# each architecture: hack/image makes it.
FROM scratch
ARG TARGETARCH VERSION REVISION
LABEL org.opencontainers.image.title="s3-csi-driver" \
      org.opencontainers.image.description="CSI driver that provisions S3 buckets and prefixes as volumes and mounts them with FUSE clients" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/s3-csi/s3-csi-driver" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
COPY $TARGETARCH/ /
ENTRYPOINT ["/usr/local/bin/s3-csi-driver"]
