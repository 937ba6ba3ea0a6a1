package driver

import (
	"context"
	"fmt"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/redact"
)

// defaultDeadline bounds requests whose caller set none, such as csc's. It is kubelet's own.
const defaultDeadline = 2 * time.Minute

// interceptors is what every request passes through, outermost first. The order matters: the code that is counted and
// logged is the one that the CO gets, and a panic is an error like any other by then.
func interceptors(logger klog.Logger, metrics *Metrics, running *inflight) []grpc.UnaryServerInterceptor {
	return []grpc.UnaryServerInterceptor{
		metrics.intercept,
		logRequests(logger, running),
		mapErrors,
		recoverPanics,
		setDeadline,
	}
}

// polled tells methods that COs and probes call all the time.
func polled(method string) bool {
	switch method {
	case csi.Identity_Probe_FullMethodName, csi.Identity_GetPluginCapabilities_FullMethodName, csi.Identity_GetPluginInfo_FullMethodName,
		csi.Node_NodeGetCapabilities_FullMethodName, csi.Node_NodeGetVolumeStats_FullMethodName,
		csi.Controller_ControllerGetCapabilities_FullMethodName:
		return true
	}
	return false
}

// logRequests puts the method and what it is about on the contextual logger. A failure is logged here and nowhere else.
func logRequests(logger klog.Logger, running *inflight) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		logger := logger.WithValues(subject(info.FullMethod, req)...)
		show, answer := 4, 5
		if polled(info.FullMethod) {
			show, answer = 6, 6
		}
		defer running.add(info.FullMethod, req)()
		logger.V(show).Info("Request", "request", redact.Message(req))
		start := time.Now()
		resp, err := handler(klog.NewContext(ctx, logger), req)
		took := time.Since(start).Round(time.Millisecond)
		switch code := status.Code(err); {
		case err == nil && mutates(info.FullMethod):
			logger.V(2).Info("Done", "duration", took)
		case err == nil:
		case unexpected(code):
			logger.Error(err, "Request failed", "code", code, "duration", took)
		default:
			logger.Info("Request not served", "code", code, "duration", took, "reason", status.Convert(err).Message())
		}
		if err == nil {
			logger.V(answer).Info("Response", "response", redact.Message(resp), "duration", took)
		}
		return resp, err
	}
}

// subject is what a request is about, as key and value pairs for a logger.
func subject(method string, req any) []any {
	values := []any{"method", path.Base(method)}
	if r, ok := req.(interface{ GetVolumeId() string }); ok && r.GetVolumeId() != "" {
		values = append(values, "volume", r.GetVolumeId())
	}
	if r, ok := req.(interface{ GetName() string }); ok && r.GetName() != "" {
		values = append(values, "name", r.GetName())
	}
	if r, ok := req.(interface{ GetTargetPath() string }); ok && r.GetTargetPath() != "" {
		values = append(values, "target", r.GetTargetPath())
	}
	return values
}

func mapErrors(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if err != nil {
		return nil, statusOf(ctx, info.FullMethod, err)
	}
	return resp, nil
}

// recoverPanics makes a panic an unclassified error: Internal, or Aborted where something may have happened before it.
// The CO gets no panic value, because nobody knows what is in it.
func recoverPanics(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	defer func() {
		if p := recover(); p != nil {
			klog.FromContext(ctx).Error(fmt.Errorf("panic: %v", p), "The driver has a bug", "stack", string(debug.Stack()))
			resp, err = nil, fault.Errorf(fault.Unknown, "the driver has a bug: %s panicked; its log has the stack", path.Base(info.FullMethod))
		}
	}()
	return handler(ctx, req)
}

// setDeadline leaves publications alone: their bounds are the operator's, --mount-timeout and --drain-timeout.
func setDeadline(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	switch info.FullMethod {
	case csi.Node_NodePublishVolume_FullMethodName, csi.Node_NodeUnpublishVolume_FullMethodName:
		return handler(ctx, req)
	}
	if _, ok := ctx.Deadline(); ok {
		return handler(ctx, req)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, defaultDeadline, fmt.Errorf("the caller set no deadline, and %v passed: %w", defaultDeadline, context.DeadlineExceeded))
	defer cancel()
	return handler(ctx, req)
}

// inflight knows the requests that are running, for the log of a shutdown that waits for them. The zero value is empty.
type inflight struct {
	mu   sync.Mutex
	next uint64
	runs map[uint64]string
}

// add notes a request and returns what takes the note away.
func (f *inflight) add(method string, req any) (done func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.runs == nil {
		f.runs = map[uint64]string{}
	}
	id := f.next
	f.next++
	var words []string
	for i, v := range subject(method, req) {
		if i%2 == 1 { // the values
			words = append(words, fmt.Sprint(v))
		}
	}
	f.runs[id] = strings.Join(words, " ")
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.runs, id)
	}
}

// list names the running requests.
func (f *inflight) list() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := make([]string, 0, len(f.runs))
	for _, text := range f.runs {
		names = append(names, text)
	}
	slices.Sort(names)
	return names
}
