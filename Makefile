# s3-csi-driver. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# Tools and servers that take long to build are kept here across checkouts.
S3CSI_CACHE ?= $(HOME)/.cache/s3-csi-driver
TOOLS := $(S3CSI_CACHE)/bin
BIN := $(CURDIR)/bin
IMAGE ?= ghcr.io/s3-csi/s3-csi-driver
ARCHS ?= $(shell go env GOHOSTARCH)

# "yes" where this machine can build the client mountpoint-s3. Elsewhere tests that need it are skipped.
RUST := $(shell hack/mountpoint --usable 2>/dev/null && echo yes)

MINIO_VERSION := v0.0.0-20260212201848-7aac2a2c5b7c
# The newest that the Go of go.mod builds.
GCSFUSE_VERSION := v3.11.4
GOLANGCI_VERSION := v2.15.0
HELM_VERSION := $(shell sed -n 's,^\thelm.sh/helm/v4 ,,p' tests/kubernetes/go.mod)
KUBERNETES_VERSION := $(shell sed -n 's,^\tk8s.io/kubernetes ,,p' tests/kubernetes/go.mod)

# make test runs the suites in this order, SUITE_JOBS at a time: most of them wait more than they compute. What compiles most begins first,
# and then what takes long. The packages of tests that have namespaces of their own (tests/internal/isolate) do not notice each other. process-% and
# systemd-% are a directory of tests with helpers as processes and as units of systemd, race-% one whose driver, helpers and rclone clients
# have the race detector. Those of the faults start a thousand clients, which are built without it.
SUITE_JOBS ?= 4
APART := node faults lifecycle systemd credentials controller policy
SUITES := units systemd-node race-node models controller race-faults systemd-faults process-others process-systemd process-credentials clients vet \
	race-linger systemd-linger systemd-upgrade systemd-credentials race-lifecycle race-rig

# Tests are in lanes by build tags. Without the tag "lane" a package has all its tests; with it, those of the lanes that are tags, too:
# - tests/node: ordinary; timed, which check the times that the driver promises, and run with nothing beside them; linger, with a process of
#   its own, because a mount does not linger while the mount namespaces of other tests have copies of it.
# - tests/credentials: ordinary, and without a lane the search for secrets in everything that can be seen.
# - tests/e2e: shared, of one cluster; deploy, which deploy the driver again; disrupt, which restart it, kubelet or the node or start many
#   pods. The latter two run their tests one after the other, in a cluster of their own.
LANE := go test -vet=off -count=1 -tags lane

# The commit of whose driver tests upgrade; hack/older chooses one.
OLDER ?=

# Which of the tests in a Kubernetes make e2e runs.
E2E ?= .
# How many clusters run at a time. Each uses 3 GB. Those of the tests that run one after the other wait for most of the time, and are to have
# their third of a processor at once: the one that many tests share is nice to them, and with it the cgroup of its cluster (tests/internal/systemd).
E2E_JOBS ?= 3

MODULES := . clients/rclone tests
# One set of flags for building, vetting and testing, so that nothing is compiled twice.
export CGO_ENABLED := 0
export GOFLAGS := $(strip $(filter-out -trimpath,$(GOFLAGS)) -trimpath)
# Tests that run the code in their own process do so with the race detector, which needs cgo.
RACE_TEST := CGO_ENABLED=1 go test -vet=off -race
LDFLAGS := -s -w -X main.version=$(VERSION)

# The chart is rendered and tested with these.
export HELM := $(TOOLS)/helm-$(HELM_VERSION)
export KUBECTL := $(TOOLS)/kubectl-$(KUBERNETES_VERSION)
# The programs of the Kubernetes that make e2e runs. They are built again when one of their sources changes.
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
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

.PHONY: setup
setup: ## Install what a fresh Debian or Ubuntu machine lacks (as root), and download the Go modules
	hack/setup

.PHONY: build
build: ## Build the driver, its helper and its rclone client into bin/
	go build -ldflags "$(LDFLAGS)" -o $(BIN)/ ./cmd/...
	cd clients/rclone && go build -ldflags "-s -w" -o $(BIN)/s3-csi-rclone .

# The client over Mountpoint's libraries takes minutes to build, so it is cached by its sources.
MOUNTPOINT := $(TOOLS)/s3-csi-mountpoint-$(shell cat hack/mountpoint $$(git ls-files clients/mountpoint) | sha256sum | cut -c1-16)

.PHONY: mountpoint
mountpoint: $(MOUNTPOINT) ## Build the client mountpoint-s3 into bin/, with Rust
	mkdir -p $(BIN)
	ln -f $< $(BIN)/s3-csi-mountpoint 2>/dev/null || cp $< $(BIN)/s3-csi-mountpoint

$(MOUNTPOINT):
	rm -f $(TOOLS)/s3-csi-mountpoint-*
	hack/mountpoint $@

.PHONY: test-parts
test-parts: build $(if $(RUST),mountpoint) servers failpoints older $(TOOLS)/minio $(TOOLS)/gcs $(HELM) $(KUBECTL) ## Build what the tests run beside the driver: the client in Rust, S3 servers, an older driver, one with failpoints

.PHONY: servers failpoints older
servers:
	cd tests && go build -o $(BIN)/test/ ./cmd/...

failpoints:
	go build -tags failpoints -o $(BIN)/test/failpoints/ ./cmd/...

older:
	hack/older $(BIN)/test/old $(OLDER)

# The driver, its helper and its client with the race detector. tests/internal/race has them report to the tests.
.PHONY: race
race: build $(if $(RUST),mountpoint) servers older
	mkdir -p $(BIN)/race/test
	printf '{"Replace": {"%s/cmd/s3-csi-driver/race.go": "%s", "%s/cmd/s3-csi-helper/race.go": "%s", "%s/clients/rclone/race.go": "%s"}}' \
		$(foreach n,1 2 3,$(CURDIR) $(CURDIR)/tests/internal/race/report.go) >$(BIN)/race/overlay.json
	CGO_ENABLED=1 go build -race -overlay $(BIN)/race/overlay.json -ldflags "$(LDFLAGS)" -o $(BIN)/race/ ./cmd/...
	CGO_ENABLED=1 go build -race -overlay $(BIN)/race/overlay.json -tags failpoints -o $(BIN)/race/test/failpoints/ ./cmd/...
	cd clients/rclone && CGO_ENABLED=1 go build -race -overlay $(BIN)/race/overlay.json -ldflags "-s -w" -o $(BIN)/race/s3-csi-rclone .
	ln -sfn $(addprefix $(BIN)/test/,container-agent old) $(BIN)/race/test/
	mkdir -p $(BIN)/race/faults
	ln -f $(addprefix $(BIN)/,race/s3-csi-driver race/s3-csi-helper race/s3-csi-fusermount race/s3-csi-fuse-starter s3-csi-rclone) $(BIN)/race/faults/
	if [ -e $(BIN)/s3-csi-mountpoint ]; then for d in race race/faults; do ln -f $(BIN)/s3-csi-mountpoint $(BIN)/$$d/; done; fi
	ln -sfn ../test $(BIN)/race/faults/test

.PHONY: $(TOOLS)/minio
$(TOOLS)/minio: $(TOOLS)/minio-$(MINIO_VERSION)
	ln -sf $< $@

$(TOOLS)/minio-$(MINIO_VERSION):
	mkdir -p $(TOOLS)
	GOBIN=$(TOOLS)/.minio go install github.com/minio/minio@$(MINIO_VERSION)
	mv $(TOOLS)/.minio/minio $@

# gcsfuse, and the emulator of its service that its own tests use, in the version that they use.
.PHONY: $(TOOLS)/gcs
$(TOOLS)/gcs: $(TOOLS)/gcs-$(GCSFUSE_VERSION)
	ln -sfn $< $@

$(TOOLS)/gcs-$(GCSFUSE_VERSION):
	mkdir -p $@.unfinished
	dir=$$(go mod download -json github.com/googlecloudplatform/gcsfuse/v3@$(GCSFUSE_VERSION) | sed -n 's/^\t"Dir": "\(.*\)",$$/\1/p') && \
		go build -C "$$dir" -ldflags "-s -w" -o $@.unfinished/ . github.com/fsouza/fake-gcs-server
	mv $@.unfinished $@

.PHONY: test
test: suites ## Run every test of every module but those of make e2e; what needs root or FUSE says so when it is skipped
	$(MAKE) --no-print-directory timed

.PHONY: suites
suites: test-parts race $(if $(RUST),mountpoint-units)
	$(MAKE) --no-print-directory -j$(SUITE_JOBS) -Otarget -k $(SUITES)

# Only the programs of a test of nodes. The client in Rust is cached, and left out where it cannot be built.
.PHONY: node-test
node-test: build servers failpoints $(if $(RUST),mountpoint) ## Run tests of a node: T=TestRepublication, LAUNCHER=systemd
	cd tests && S3CSI_LAUNCHER=$(LAUNCHER) go test -vet=off -count=1 -timeout 10m -run '$(or $(T),$(error T must name a test))' ./node

# The other suites leave it to this one.
.PHONY: vet
vet:
	for m in $(MODULES); do (cd $$m && go vet ./...); done

# Random histories against a model. One goroutine at a time runs there, so the race detector would only make them slow.
.PHONY: models
models:
	go test -vet=off -count=1 -timeout 20m ./pkg/provision

.PHONY: units clients mountpoint-units controller race-linger systemd-linger process-others systemd-credentials timed
units:
	$(RACE_TEST) -timeout 15m ./...

clients:
	cd clients/rclone && $(RACE_TEST) -parallel 8 -timeout 15m ./...

mountpoint-units:
	hack/mountpoint --test

controller:
	cd tests && $(RACE_TEST) -count=1 -timeout 20m ./controller/... ./policy/...

race-%: export S3CSI_BIN := $(BIN)/race
race-faults: export S3CSI_BIN := $(BIN)/race/faults
race-%: export S3CSI_RACE := 1
race-rig: # its tests are those of the detector's reports
	cd tests && go test -vet=off -count=1 ./internal/rig

race-%:
	cd tests && $(LANE),ordinary -parallel 3 -timeout 30m ./$*/...

process-%:
	cd tests && $(LANE),ordinary -parallel 3 -timeout 30m ./$*/...

systemd-%:
	cd tests && S3CSI_LAUNCHER=systemd $(LANE),ordinary -parallel 3 -timeout 30m ./$*/...

process-others:
	cd tests && apart='$(APART)' && go test -vet=off -count=1 -p 2 -parallel 3 -timeout 30m $$(go list ./... | grep -vE "/tests/(e2e|$${apart// /|})(/|$$)")

# -parallel 2: more tests side by side have copies of each other's mounts.
race-linger:
	cd tests && $(LANE),linger -parallel 2 -timeout 10m ./node

systemd-linger:
	cd tests && S3CSI_LAUNCHER=systemd $(LANE),linger -parallel 2 -timeout 10m ./node

systemd-credentials: # the test that looks for secrets in the properties of units, too
	cd tests && S3CSI_LAUNCHER=systemd $(LANE) -timeout 5m ./credentials

timed: test-parts
	cd tests && $(LANE),timed -parallel 4 -timeout 10m ./node
	cd tests && S3CSI_LAUNCHER=systemd $(LANE),timed -parallel 4 -timeout 10m ./node

# Without -v, what a failed test says stands beside its name.
.PHONY: e2e e2e-deploy e2e-disrupt e2e-share e2e-some
e2e: test-parts $(if $(RUST),image) $(CLUSTER) ## Deploy the driver with its chart in a real Kubernetes, built and run here, and use it (as root)
	$(MAKE) --no-print-directory -j$(E2E_JOBS) -Otarget -k $(if $(filter .,$(E2E)),e2e-disrupt e2e-share e2e-deploy,e2e-some)

e2e-deploy:
	cd tests && $(LANE),deploy -timeout 40m ./e2e

e2e-disrupt:
	cd tests && $(LANE),disrupt -timeout 40m ./e2e

e2e-share:
	cd tests && nice -n 1 $(LANE),shared -timeout 40m -parallel 10 ./e2e

e2e-some:
	cd tests && go test -vet=off -count=1 -timeout 75m -parallel 10 -run '$(E2E)' ./e2e

.PHONY: cluster
cluster: $(CLUSTER)

$(CLUSTER):
	rm -rf $(TOOLS)/kubernetes-*
	hack/kubernetes $@.unfinished
	mv $@.unfinished $@

$(HELM):
	mkdir -p $(TOOLS)
	cd tests/kubernetes && go build -ldflags "-s -w" -o $@ helm.sh/helm/v4/cmd/helm

$(KUBECTL):
	mkdir -p $(TOOLS)
	cd tests/kubernetes && go build -ldflags "-s -w" -o $@ k8s.io/kubernetes/cmd/kubectl

.PHONY: demo
demo: build $(if $(RUST),$(if $(filter rclone,$(CLIENT)),,mountpoint)) ## Show the whole way from nothing to files in S3, on this machine (as root), with CLIENT (mountpoint-s3 or rclone)
	cd tests && go build -o $(BIN)/test/ ./cmd/s3server ./cmd/demo
	$(BIN)/test/demo

.PHONY: bench
bench: test-parts $(if $(RUST),image) $(CLUSTER) ## Measure the mount path against the bare client, the controller, and what users of a Kubernetes wait for, in one run (as root)
	cd tests && go test -v -run '^$$' -bench . -benchtime 1x -timeout 30m ./bench/... ./controller/... ./podclient
	cd tests && S3CSI_LAUNCHER=systemd go test -v -run '^$$' -bench 'Cold|Heal|Storm' -benchtime 1x -timeout 30m ./bench/...
	cd tests && go test -run '^$$' -bench . -benchtime 1x -timeout 30m ./e2e

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (10s)
	hack/fuzz $(or $(FUZZTIME),10s)

.PHONY: fmt
fmt: ## Format the code
	gofmt -s -w $(shell git ls-files '*.go')

.PHONY: lint
lint: $(TOOLS)/golangci-lint-$(GOLANGCI_VERSION) ## Check the style of code and pages
	@test -z "$$(gofmt -s -l $$(git ls-files '*.go'))" || { echo "not formatted; run make fmt:"; gofmt -s -l $$(git ls-files '*.go'); exit 1; }
	for m in $(MODULES); do (cd $$m && $< run ./...); done
	cd tests && go test -vet=off -count=1 ./docs

$(TOOLS)/golangci-lint-$(GOLANGCI_VERSION):
	mkdir -p $(TOOLS)
	GOBIN=$(TOOLS)/.golangci go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv $(TOOLS)/.golangci/golangci-lint $@

.PHONY: docs
docs: ## Render the reference pages that tests compare with the code
	go test ./pkg/client ./pkg/driver ./pkg/volume -run Doc -update
	cd tests && go test ./chart -run TestReadme -update
	cd tests && go test ./internal/fuseclients -run Doc -update

.PHONY: manifests
manifests: $(HELM) ## Render the manifests of deploy/ from the chart
	hack/render

.PHONY: image
image: build mountpoint ## Build the container image for ARCHS, without a network: bin/image/<arch>.tar
	VERSION=$(VERSION) hack/image $(IMAGE):$(VERSION) $(BIN) $(ARCHS)

.PHONY: release
release: image $(HELM) ## Push image and chart of VERSION (v1.2.3) to REGISTRY, after a login with buildah and helm
	hack/release $(REGISTRY) $(VERSION) $(BIN)/release $(foreach arch,$(ARCHS),$(BIN)/image/$(arch).tar)

.PHONY: clean
clean: ## Remove what was built here
	rm -rf $(BIN)
