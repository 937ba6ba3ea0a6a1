//go:build tools

// Package tests keeps the dependencies of the test module in its go.mod, also while no test of the day imports them.
package tests

import (
	_ "github.com/aws/aws-sdk-go-v2/config"
	_ "github.com/aws/aws-sdk-go-v2/credentials"
	_ "github.com/aws/aws-sdk-go-v2/service/s3"
	_ "github.com/aws/aws-sdk-go-v2/service/sts"
	_ "github.com/aws/smithy-go"
	_ "github.com/container-storage-interface/spec/lib/go/csi"
	_ "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	_ "github.com/onsi/ginkgo/v2"
	_ "github.com/onsi/gomega"
	_ "github.com/versity/versitygw/backend/meta"
	_ "github.com/versity/versitygw/backend/posix"
	_ "github.com/versity/versitygw/embedgw"
	_ "github.com/versity/versitygw/iamapi/private"
	_ "github.com/versity/versitygw/iamapi/storage"
	_ "go.uber.org/goleak"
	_ "golang.org/x/sys/unix"
	_ "google.golang.org/grpc"

	_ "github.com/s3-csi/s3-csi-driver/pkg/client"
	_ "github.com/s3-csi/s3-csi-driver/pkg/credentials"
	_ "github.com/s3-csi/s3-csi-driver/pkg/fault"
	_ "github.com/s3-csi/s3-csi-driver/pkg/volume"
)
