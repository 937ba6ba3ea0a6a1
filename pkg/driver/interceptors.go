package driver

import (
	"context"
	"errors"
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

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/redact"
)

// defaultDeadline is the timeout of requests without a deadline, such as those of csc. kubelet uses the same.
const defaultDeadline = 2 * time.Minute

// interceptors returns the interceptors of every request, outermost first. The order ensures that metrics and logs have the code that the
// CO gets, also after a panic.
func interceptors(logger klog.Logger, metrics *Metrics, running *inflight) []grpc.UnaryServerInterceptor {
	failures := &conc.LogLimiter{Repeat: repeatAfter, Burst: 100, PerSecond: 5}
	return []grpc.UnaryServerInterceptor{
		metrics.intercept,
		logRequests(logger, running, failures),
		setDeadline,
		mapErrors,
		recoverPanics(failures),
	}
}

// repeatAfter is how often a failure of the same method, volume and target is logged while it stays the same. COs retry as often as that.
const repeatAfter = time.Minute

// maxLogged bounds a value in the log that comes from a request, in bytes.
const maxLogged = 512

// polled reports whether COs and probes call a method periodically.
func polled(method string) bool {
	switch method {
	case csi.Identity_Probe_FullMethodName, csi.Identity_GetPluginCapabilities_FullMethodName, csi.Identity_GetPluginInfo_FullMethodName,
		csi.Node_NodeGetCapabilities_FullMethodName, csi.Node_NodeGetVolumeStats_FullMethodName,
		csi.Controller_ControllerGetCapabilities_FullMethodName:
		return true
	}
	return false
}

// logRequests adds method, volume and target to the contextual logger. Failures of requests are logged only here.
func logRequests(logger klog.Logger, running *inflight, failures *conc.LogLimiter) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		of := subject(info.FullMethod, req)
		logger := logger.WithValues(of...)
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
			logger.V(2).Info("Request succeeded", "duration", took)
		case err == nil:
		default:
			text := truncate(fullText(err), 4*maxLogged)
			ok, dropped := failures.Allow(fmt.Sprint(of...), code.String()+text, time.Now())
			if dropped > 0 {
				logger = logger.WithValues("notLogged", dropped)
			}
			switch {
			case !ok:
			case unexpected(code):
				logger.Error(errors.New(text), "Request failed", "code", code, "duration", took)
			default:
				logger.Info("Request failed", "code", code, "duration", took, "reason", text)
			}
		}
		if err == nil {
			logger.V(answer).Info("Response", "response", redact.Message(resp), "duration", took)
		}
		return resp, err
	}
}

// subject returns the method, volume and target of a request, as key-value pairs for a logger.
func subject(method string, req any) []any {
	values := []any{"method", path.Base(method)}
	if r, ok := req.(interface{ GetVolumeId() string }); ok && r.GetVolumeId() != "" {
		values = append(values, "volume", truncate(r.GetVolumeId(), maxLogged))
	}
	if r, ok := req.(interface{ GetName() string }); ok && r.GetName() != "" {
		values = append(values, "name", truncate(r.GetName(), maxLogged))
	}
	if r, ok := req.(interface{ GetTargetPath() string }); ok && r.GetTargetPath() != "" {
		values = append(values, "target", truncate(r.GetTargetPath(), maxLogged))
	}
	return values
}

func mapErrors(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if err != nil {
		return nil, statusOf(ctx, info.FullMethod, targetOf(req), err)
	}
	return resp, nil
}

// recoverPanics converts a panic to an error without a kind: Internal, or Aborted if the method may have changed something. The CO does
// not get the panic value, because it may contain secrets.
func recoverPanics(failures *conc.LogLimiter) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
		defer func() {
			if p := recover(); p != nil {
				if ok, _ := failures.Allow("panic "+info.FullMethod, fmt.Sprint(p), time.Now()); ok {
					klog.FromContext(ctx).Error(fmt.Errorf("panic: %v", p), "Panic in request handler", "stack", string(debug.Stack()))
				}
				resp, err = nil, fault.Errorf(fault.Unknown, "%s panicked, which is a bug of the driver; its log has the stack", path.Base(info.FullMethod))
			}
		}()
		return handler(ctx, req)
	}
}

// answerBefore is how long before the caller's deadline a request ends. Otherwise the caller sees its own timeout, and not the reason.
const answerBefore = time.Second

// setDeadline sets a deadline if there is none, and ends requests a moment before the caller's deadline. Unpublish does both itself, and
// publish has its own timeout: --drain-timeout and --mount-timeout.
func setDeadline(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	deadline, ok := ctx.Deadline()
	switch {
	case info.FullMethod == csi.Node_NodeUnpublishVolume_FullMethodName, !ok && info.FullMethod == csi.Node_NodePublishVolume_FullMethodName:
		return handler(ctx, req)
	case ok:
		ctx, cancel := context.WithDeadline(ctx, deadline.Add(-min(answerBefore, time.Until(deadline)/2)))
		defer cancel()
		return handler(ctx, req)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, defaultDeadline, fmt.Errorf("the default timeout of %v expired, because the caller set no deadline: %w",
		defaultDeadline, context.DeadlineExceeded))
	defer cancel()
	return handler(ctx, req)
}

// inflight tracks the requests in flight, for the log of a shutdown that waits for them. The zero value is empty.
type inflight struct {
	mu   sync.Mutex
	runs map[*string]struct{}
}

// add adds a request and returns a function that removes it.
func (f *inflight) add(method string, req any) (done func()) {
	var words []string
	for i, v := range subject(method, req) {
		if i%2 == 1 { // the values
			words = append(words, fmt.Sprint(v))
		}
	}
	run := strings.Join(words, " ")
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.runs == nil {
		f.runs = map[*string]struct{}{}
	}
	f.runs[&run] = struct{}{}
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.runs, &run)
	}
}

// list describes the requests in flight.
func (f *inflight) list() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := make([]string, 0, len(f.runs))
	for run := range f.runs {
		names = append(names, *run)
	}
	slices.Sort(names)
	return names
}
