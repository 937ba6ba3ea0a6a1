# s3-csi-driver. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# Tools and servers that take long to build are kept here across checkouts.
S3CSI_CACHE ?= $(HOME)/.cache/s3-csi-driver
TOOLS := $(S3CSI_CACHE)/bin
BIN := $(CURDIR)/bin
OLD := $(BIN)/test/old
IMAGE ?= s3-csi-driver
PLATFORMS ?= linux/amd64,linux/arm64
MOUNT_S3_VERSION ?= 1.24.0

MINIO_VERSION := v0.0.0-20260212201848-7aac2a2c5b7c
GOLANGCI_VERSION := v2.15.0
HELM_VERSION := $(shell sed -n 's,^\thelm.sh/helm/v4 ,,p' tests/kubernetes/go.mod)
KUBERNETES_VERSION := $(shell sed -n 's,^\tk8s.io/kubernetes ,,p' tests/kubernetes/go.mod)

# The packages of tests that hold for helpers as processes, which go test runs, and as units of systemd.
BOTH_LAUNCHERS := ./faults/... ./node/... ./upgrade/...

# Which of the tests in a Kubernetes make e2e runs.
E2E ?= .

# The test of tests/credentials that looks for secrets in the properties of units, too.
SECRETS := NothingSecret

MODULES := . clients/rclone tests
GO_BUILD := CGO_ENABLED=0 go build -trimpath
LDFLAGS := -s -w -X main.version=$(VERSION)

# The chart is rendered and tested with these.
export HELM := $(TOOLS)/helm-$(HELM_VERSION)
export KUBECTL := $(TOOLS)/kubectl-$(KUBERNETES_VERSION)
# The programs of the Kubernetes that make e2e runs. They are built anew when something changes that they are made of.
CLUSTER := $(TOOLS)/kubernetes-$(shell cat hack/kubernetes $$(git ls-files tests/kubernetes) | sha256sum | cut -c1-16)
export S3CSI_CLUSTER_BIN := $(CLUSTER)

# Where tests and the demo find the programs.
export S3CSI_CACHE
# A program built with the race detector otherwise sleeps for a second when it exits.
export GORACE := atexit_sleep_ms=50
export S3CSI_BIN := $(BIN)
export S3SERVER_BIN := $(BIN)/test/s3server

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

.PHONY: setup
setup: ## Install what a fresh Debian or Ubuntu machine lacks (as root), and download the Go modules
	hack/setup

.PHONY: build
build: ## Build the driver, its helper and its rclone client into bin/
	$(GO_BUILD) -ldflags "$(LDFLAGS)" -o $(BIN)/ ./cmd/...
	cd clients/rclone && $(GO_BUILD) -ldflags "-s -w" -o $(BIN)/s3-csi-rclone .

.PHONY: test-parts
test-parts: build $(TOOLS)/minio-$(MINIO_VERSION) $(HELM) $(KUBECTL) $(OLD)/s3-csi-driver ## Build what the tests run beside the driver: S3 servers, the mount-s3 stand-in, an older driver, one that can be held
	cd tests && $(GO_BUILD) -o $(BIN)/test/ ./cmd/...
	$(GO_BUILD) -tags failpoints -o $(BIN)/test/failpoints/ ./cmd/...
	ln -sf $(TOOLS)/minio-$(MINIO_VERSION) $(TOOLS)/minio

# The driver and helper of which the tests upgrade, and to which they go back. hack/freeze makes the archive.
$(OLD)/s3-csi-driver: tests/upgrade/testdata/older.tar.gz
	source=$$(mktemp -d); trap 'rm -rf "$$source"' EXIT; \
		tar -xzf $< -C "$$source"; cd "$$source"; \
		$(GO_BUILD) -ldflags "-s -w -X main.version=older" -o $(OLD)/ ./cmd/...
	touch $@

$(TOOLS)/minio-$(MINIO_VERSION):
	mkdir -p $(TOOLS)
	GOBIN=$(TOOLS)/.minio CGO_ENABLED=0 go install github.com/minio/minio@$(MINIO_VERSION)
	mv $(TOOLS)/.minio/minio $@

.PHONY: test
test: test-parts ## Run every test of every module but those of make e2e; what needs root or FUSE says so when it is skipped
	for m in $(MODULES); do (cd $$m && go vet ./...); done
	go test -race -timeout 15m ./...
	cd clients/rclone && go test -race -parallel 8 -timeout 15m ./...
	cd tests && go test -race -count=1 -p 1 -parallel 3 -timeout 30m $$(go list ./... | grep -v /e2e)
	cd tests && S3CSI_LAUNCHER=systemd go test -race -count=1 -p 1 -parallel 3 -timeout 30m $(BOTH_LAUNCHERS)
	cd tests && S3CSI_LAUNCHER=systemd go test -race -count=1 -timeout 5m -run $(SECRETS) ./credentials

.PHONY: e2e
e2e: test-parts $(CLUSTER) ## Deploy the driver with its chart in a real Kubernetes, built and run here, and use it (as root)
	cd tests && go test -count=1 -v -timeout 75m -parallel 8 -run '$(E2E)' ./e2e

$(CLUSTER):
	rm -rf $(TOOLS)/kubernetes-*
	hack/kubernetes $@.unfinished
	mv $@.unfinished $@

$(HELM):
	mkdir -p $(TOOLS)
	cd tests/kubernetes && $(GO_BUILD) -ldflags "-s -w" -o $@ helm.sh/helm/v4/cmd/helm

$(KUBECTL):
	mkdir -p $(TOOLS)
	cd tests/kubernetes && $(GO_BUILD) -ldflags "-s -w" -o $@ k8s.io/kubernetes/cmd/kubectl

.PHONY: demo
demo: build ## Show the whole way from nothing to files in S3, on this machine (as root)
	cd tests && $(GO_BUILD) -o $(BIN)/test/ ./cmd/s3server ./cmd/demo
	$(BIN)/test/demo

.PHONY: bench
bench: test-parts ## Measure the mount path against the bare client, and the controller, in one run (as root)
	cd tests && go test -run '^$$' -bench . -benchtime 1x -timeout 30m ./bench/... ./controller/...
	cd tests && S3CSI_LAUNCHER=systemd go test -run '^$$' -bench 'Cold|Heal|Storm' -benchtime 1x -timeout 30m ./bench/...

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (10s)
	hack/fuzz $(or $(FUZZTIME),10s)

.PHONY: fmt
fmt: ## Format the code
	gofmt -s -w $(shell git ls-files '*.go')

.PHONY: lint
lint: $(TOOLS)/golangci-lint-$(GOLANGCI_VERSION) ## Check the code's style
	@test -z "$$(gofmt -s -l $$(git ls-files '*.go'))" || { echo "not formatted; run make fmt:"; gofmt -s -l $$(git ls-files '*.go'); exit 1; }
	for m in $(MODULES); do (cd $$m && $< run ./...); done

$(TOOLS)/golangci-lint-$(GOLANGCI_VERSION):
	mkdir -p $(TOOLS)
	GOBIN=$(TOOLS)/.golangci go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv $(TOOLS)/.golangci/golangci-lint $@

.PHONY: docs
docs: ## Render the reference pages that tests compare with the code
	go test ./pkg/client ./pkg/driver ./pkg/volume -run Doc -update
	cd tests && go test ./chart -run TestReadme -update

.PHONY: manifests
manifests: $(HELM) ## Render the manifests of deploy/ from the chart
	hack/render

.PHONY: image
image: ## Build the container image for PLATFORMS, with AWS's mount-s3 MOUNT_S3_VERSION
	docker buildx build --platform $(PLATFORMS) --build-arg VERSION=$(VERSION) \
		--build-arg MOUNT_S3_VERSION=$(MOUNT_S3_VERSION) $$(hack/mount-s3-digests $(MOUNT_S3_VERSION)) -t $(IMAGE):$(VERSION) .

.PHONY: clean
clean: ## Remove what was built here
	rm -rf $(BIN)
