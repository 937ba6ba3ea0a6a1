package driver

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestLog_FailuresAreLoggedOnce(t *testing.T) {
	r := start(t, func(_ *Config, m *fakeMounter) { m.err = fault.Errorf(fault.Busy, "draining: 3 uploads") })
	_, err := csi.NewNodeClient(r.conn).NodePublishVolume(t.Context(), publishRequest())
	if status.Code(err) != codes.Aborted || !strings.HasSuffix(status.Convert(err).Message(), "draining: 3 uploads; see "+pagePodStarts) {
		t.Errorf("got %v", err)
	}
	var lines []string
	for line := range strings.Lines(r.log.String()) {
		if strings.Contains(line, "draining: 3 uploads") {
			lines = append(lines, line)
		}
	}
	if len(lines) != 1 {
		t.Fatalf("%d log lines tell of the failure: %q", len(lines), lines)
	}
	for _, part := range []string{`method="NodePublishVolume"`, `volume="default:bucket-1/a/"`, `target="/pods/1/mount"`, `code="Aborted"`} {
		if !strings.Contains(lines[0], part) {
			t.Errorf("the log line lacks %s: %s", part, lines[0])
		}
	}
	if lines[0][0] != 'I' {
		t.Errorf("what every CO meets is not the driver's fault: %s", lines[0])
	}
}

func TestLog_FollowsVerbosity(t *testing.T) {
	for verbosity, want := range map[int]struct{ says, silent []string }{
		0: {nil, []string{`"Request succeeded"`, `"Request"`, `"Response"`}},
		2: {[]string{`"Request succeeded" method="NodePublishVolume"`}, []string{`"Request"`, `"Response"`}},
		4: {[]string{`"Request" method="NodePublishVolume"`}, []string{`"Response"`, `method="Probe"`}},
		5: {[]string{`"Request" method="NodePublishVolume"`, `"Response" method="NodePublishVolume"`}, []string{`method="Probe"`}},
		6: {[]string{`"Request" method="Probe"`, `"Response" method="Probe"`}, nil},
	} {
		log := &logBuffer{}
		handler := logRequests(textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log), textlogger.Verbosity(verbosity))), &inflight{}, &conc.LogLimiter{})
		call := func(method string, req any, err error) {
			_, _ = handler(t.Context(), req, &grpc.UnaryServerInfo{FullMethod: method}, func(context.Context, any) (any, error) { return &csi.ProbeResponse{}, err })
		}
		call(csi.Identity_Probe_FullMethodName, &csi.ProbeRequest{}, nil)
		call(csi.Node_NodePublishVolume_FullMethodName, publishRequest(), nil)
		call(csi.Controller_CreateVolume_FullMethodName, createRequest(), status.Error(codes.InvalidArgument, "a reason"))
		// What went wrong is always there.
		for _, word := range append(want.says, `"Request failed" method="CreateVolume"`, "a reason") {
			if !strings.Contains(log.String(), word) {
				t.Errorf("%s is not logged at verbosity %d:\n%s", word, verbosity, log)
			}
		}
		for _, word := range want.silent {
			if strings.Contains(log.String(), word) {
				t.Errorf("%s is logged at verbosity %d:\n%s", word, verbosity, log)
			}
		}
	}
}

// TestFailedRequests_LogIsBounded fails many requests, the same one and others with long values.
func TestFailedRequests_LogIsBounded(t *testing.T) {
	metrics := NewMetrics("s3.csi.driver", "v0")
	log := &logBuffer{}
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log)))
	call := func(chain []grpc.UnaryServerInterceptor, req *csi.NodePublishVolumeRequest, err error) {
		info := &grpc.UnaryServerInfo{FullMethod: csi.Node_NodePublishVolume_FullMethodName}
		handler := func(context.Context, any) (any, error) { return nil, err }
		for _, i := range slices.Backward(chain) {
			next := handler
			handler = func(ctx context.Context, req any) (any, error) { return i(ctx, req, info, next) }
		}
		_, _ = handler(t.Context(), req)
	}
	chain := interceptors(logger, metrics, &inflight{})
	for i := range 1000 {
		call(chain, publishRequest(), fault.Errorf(fault.Unavailable, "no answer for %d s", i))
	}
	if n := strings.Count(log.String(), "Request failed"); n != 1 {
		t.Errorf("the same failure is logged %d times", n)
	}
	call(chain, publishRequest(), fault.Errorf(fault.Unavailable, "another reason"))
	if !strings.Contains(log.String(), "another reason") || !strings.Contains(log.String(), "notLogged=999") {
		t.Errorf("another failure, and the number of those that were not logged, is missing:\n%s", log)
	}
	for i := range 10000 {
		req := publishRequest()
		req.VolumeId, req.TargetPath = strings.Repeat("x", 10000)+strconv.Itoa(i), strings.Repeat("y", 10000)
		call(chain, req, fault.Errorf(fault.Invalid, "%s", req.VolumeId))
	}
	if size := len(log.String()); size > 1<<20 {
		t.Errorf("the log of 10000 failures has %d bytes", size)
	}
}

func TestLog_InnerMessagesNameTheRequest(t *testing.T) {
	log := &logBuffer{}
	handler := logRequests(newTestLogger(log), &inflight{}, &conc.LogLimiter{})
	_, err := handler(t.Context(), publishRequest(), &grpc.UnaryServerInfo{FullMethod: csi.Node_NodePublishVolume_FullMethodName},
		func(ctx context.Context, _ any) (any, error) {
			klog.FromContext(ctx).Info("inner")
			return &csi.NodePublishVolumeResponse{}, nil
		})
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, `"inner"`) && strings.Contains(line, `target="/pods/1/mount"`) {
			return
		}
	}
	t.Errorf("no inner log line with the target:\n%s", log)
}

func TestLog_HasNoSecrets(t *testing.T) {
	r := start(t, nil)
	req := publishRequest()
	req.Secrets = map[string]string{"accessKeyID": "AKIACANARY", "secretAccessKey": "canary-1", "sessionToken": "canary-2", tokensKey: "canary-3"}
	req.VolumeContext = map[string]string{tokensKey: "canary-4"}
	if _, err := csi.NewNodeClient(r.conn).NodePublishVolume(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	log := r.log.String()
	if strings.Contains(log, "canary") {
		t.Errorf("the log has a secret:\n%s", log)
	}
	if !strings.Contains(log, "volume_context") {
		t.Errorf("the log does not show the request:\n%s", log)
	}
	if r.mounter.last.Keys.SecretAccessKey != "canary-1" {
		t.Error("redaction changed the live request")
	}
}

func TestPanic_IsAnError(t *testing.T) {
	r := start(t, func(_ *Config, m *fakeMounter) { m.panics = "canary" })
	node := csi.NewNodeClient(r.conn)
	// A mount may have been left behind, so the code is one that COs retry.
	if _, err := node.NodePublishVolume(t.Context(), publishRequest()); status.Code(err) != codes.Aborted || strings.Contains(err.Error(), "canary") {
		t.Errorf("publish: %v", err)
	}
	if _, err := node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "v", VolumePath: "/p"}); status.Code(err) != codes.Internal {
		t.Errorf("stats: %v", err)
	}
	if log := r.log.String(); !strings.Contains(log, "panic: canary") || !strings.Contains(log, "fakes_test.go") {
		t.Errorf("the log lacks the panic or its stack:\n%s", log)
	}
	if _, err := node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}); err != nil {
		t.Errorf("after a panic: %v", err)
	}
}

func TestDeadline_IsSetIfMissing(t *testing.T) {
	var left time.Duration
	look := func(ctx context.Context, _ any) (any, error) {
		deadline, _ := ctx.Deadline()
		left = time.Until(deadline)
		return nil, nil
	}
	create := &grpc.UnaryServerInfo{FullMethod: csi.Controller_CreateVolume_FullMethodName}
	if _, err := setDeadline(t.Context(), nil, create, look); err != nil || left <= 0 || left > defaultDeadline {
		t.Errorf("none given: %v left, %v", left, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	if _, err := setDeadline(ctx, nil, create, look); err != nil || left < 50*time.Minute || left > time.Hour-answerBefore {
		t.Errorf("an hour given: %v left, %v", left, err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), answerBefore)
	defer cancel()
	if _, err := setDeadline(ctx, nil, create, look); err != nil || left <= 0 || left > answerBefore/2 {
		t.Errorf("%v given: %v left, %v", answerBefore, left, err)
	}
	unpublish := &grpc.UnaryServerInfo{FullMethod: csi.Node_NodeUnpublishVolume_FullMethodName}
	if _, err := setDeadline(t.Context(), nil, unpublish, look); err != nil || left > 0 {
		t.Errorf("an unpublish, which --drain-timeout bounds: %v left, %v", left, err)
	}
}

// A caller whose deadline has passed sees its own timeout only, so the driver answers before.
func TestDeadline_AnswerComesBefore(t *testing.T) {
	r := start(t, func(_ *Config, m *fakeMounter) { m.block = make(chan struct{}) })
	for _, limit := range []time.Duration{500 * time.Millisecond, 2 * time.Second} {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		_, err := csi.NewNodeClient(r.conn).NodePublishVolume(ctx, publishRequest())
		cancel()
		if text := status.Convert(err).Message(); status.Code(err) != codes.DeadlineExceeded || !strings.HasSuffix(text, "; see "+pagePodStarts) {
			t.Errorf("within %v: %v", limit, err)
		}
	}
}

func TestMetrics_CountReturnedCodes(t *testing.T) {
	r := start(t, func(_ *Config, m *fakeMounter) { m.err = errors.New("who knows") })
	_, _ = csi.NewNodeClient(r.conn).NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "v", VolumePath: "/p"})
	families, err := r.cfg.Metrics.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "grpc_status_code" && l.GetValue() == "Internal" {
					return
				}
			}
		}
	}
	t.Error("no operation is counted as Internal")
}
