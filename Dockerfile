# syntax=docker/dockerfile:1
# The driver, its rclone client and AWS's mount-s3, for linux/amd64 and linux/arm64.
#
# mount-s3 is fetched from AWS's published packages. Its digests have no default: `hack/mount-s3-digests VERSION` downloads
# the packages, checks AWS's signature on them and prints the build arguments.
ARG GO_VERSION=1.26
ARG MOUNT_S3_VERSION=1.24.0

FROM --platform=$BUILDPLATFORM golang:${GO_VERSION}-bookworm AS build
ARG TARGETOS TARGETARCH VERSION=dev
WORKDIR /src
COPY go.mod go.sum ./
COPY clients/rclone/go.mod clients/rclone/go.sum clients/rclone/
RUN go mod download && cd clients/rclone && go mod download
COPY . .
ENV CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH
RUN go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /out/ ./cmd/... \
 && cd clients/rclone && go build -trimpath -ldflags "-s -w" -o /out/s3-csi-rclone .

FROM --platform=$BUILDPLATFORM debian:bookworm-slim AS mount-s3
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
FROM gcr.io/distroless/base-debian12
COPY --from=build /out/ /usr/local/bin/
COPY --from=mount-s3 /out/mount-s3 /usr/local/bin/
COPY LICENSE /
ENTRYPOINT ["/usr/local/bin/s3-csi-driver"]
