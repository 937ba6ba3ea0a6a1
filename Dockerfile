# syntax=docker/dockerfile:1.25.0@sha256:0adf442eae370b6087e08edc7c50b552d80ddf261576f4ebd6421006b2461f12
# The driver, its rclone client and AWS's mount-s3, for linux/amd64 and linux/arm64.
#
# mount-s3 is fetched from AWS's published packages. Its digests have no default: `hack/mount-s3-digests VERSION` downloads
# the packages, checks AWS's signature on them and prints the build arguments.
#
# Images are pinned by the digests of their multi-platform indexes; `hack/image-digests` checks and renews them.
ARG MOUNT_S3_VERSION=1.24.0

FROM --platform=$BUILDPLATFORM golang:1.26.8-bookworm@sha256:a688600ca24f8a4d3ca77f95b0dd40704a9fc787c826660eb7ba0b641b8b175d AS build
ARG TARGETOS TARGETARCH VERSION=dev
WORKDIR /src
COPY go.mod go.sum ./
COPY clients/rclone/go.mod clients/rclone/go.sum clients/rclone/
RUN go mod download && cd clients/rclone && go mod download
COPY . .
ENV CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH
RUN go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /out/ ./cmd/... \
 && cd clients/rclone && go build -trimpath -ldflags "-s -w" -o /out/s3-csi-rclone .

FROM --platform=$BUILDPLATFORM debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171 AS mount-s3
ARG TARGETARCH MOUNT_S3_VERSION MOUNT_S3_SHA256_AMD64 MOUNT_S3_SHA256_ARM64
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl && rm -rf /var/lib/apt/lists/*
RUN set -eu; \
    case "$TARGETARCH" in \
      amd64) arch=x86_64 digest=$MOUNT_S3_SHA256_AMD64 ;; \
      arm64) arch=arm64 digest=$MOUNT_S3_SHA256_ARM64 ;; \
      *) echo "mount-s3 is not published for $TARGETARCH" >&2; exit 1 ;; \
    esac; \
    [ -n "$digest" ] || { echo "give --build-arg MOUNT_S3_SHA256_AMD64=… and MOUNT_S3_SHA256_ARM64=… (hack/mount-s3-digests $MOUNT_S3_VERSION)" >&2; exit 1; }; \
    curl -fsSL -o /tmp/mount-s3.tar.gz "https://s3.amazonaws.com/mountpoint-s3-release/$MOUNT_S3_VERSION/$arch/mount-s3-$MOUNT_S3_VERSION-$arch.tar.gz"; \
    echo "$digest  /tmp/mount-s3.tar.gz" | sha256sum -c -; \
    mkdir /out; tar -xzf /tmp/mount-s3.tar.gz -C /out --strip-components=2 ./bin/mount-s3

# mount-s3 needs glibc; the driver and the rclone client need nothing.
FROM gcr.io/distroless/base-debian12:latest@sha256:fabbf1c0c357a3d42550111351daed089b20a2c954df13ee2fcff60602515e84
COPY --from=build /out/ /usr/local/bin/
COPY --from=mount-s3 /out/mount-s3 /usr/local/bin/
COPY LICENSE /
ENTRYPOINT ["/usr/local/bin/s3-csi-driver"]
