package provision_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/smithy-go"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity/identitytest"
)

// world is a service and the controller processes that use it. Its clock is that of a synctest bubble. One goroutine, the bubble's first one, carries
// out all requests, one at a time: before each it waits until all other goroutines wait for something, so that the order of requests is its choice.
type world struct {
	s         *service
	config    *backend.Config
	processes [processes]*process
	calls     []*call // that have no answer yet
	running   sync.WaitGroup
	failure   error // the first violation
	sent      map[string]int
	denied    []string // operations that are not allowed
	lacking   []string // operations that the service does not have

	mu      sync.Mutex
	pending []*request
	news    chan struct{} // holds one token if a request or an answer arrived
}

// responseTimeout is how long a client waits for the answer to a request.
const responseTimeout = 30 * time.Second

// process is a controller process: a Provisioner that knows nothing of others.
type process struct {
	*provision.Provisioner
	w    *world
	n    int
	s3   *backend.Clients
	life context.Context
	end  context.CancelFunc
	dead chan struct{} // closed when the process was killed
	// awake is closed while the process is not suspended. w.mu guards it.
	awake chan struct{}
}

// request is a request that the service has not carried out yet.
type request struct {
	p         *process
	operation string
	bucket    string
	http      *http.Request
	body      []byte
	sent      time.Time
	answer    chan reply
	gone      atomic.Bool // the process no longer waits for the answer
}

type reply struct {
	response *http.Response
	err      error
}

func (r *request) String() string {
	return fmt.Sprintf("%s of %s by process %d", r.operation, strings.TrimPrefix(r.http.URL.Path, "/"), r.p.n)
}

// call is a call of a process.
type call struct {
	what     string
	p        *process
	from, to int // the changes of the service during the call
	ghosts   int // requests, of processes that no longer waited for them, that could still be carried out when the call began
	answered bool
	killed   bool // the process was killed before it answered
	err      error
	judge    func(*call)
}

func newWorld() *world {
	w := &world{s: newService(), sent: map[string]int{}, news: make(chan struct{}, 1)}
	var err error
	if w.config, err = backend.ParseConfig([]byte("backends: {lab: {endpoint: 'http://192.0.2.1', region: us-east-1, addressing: path}}"), "", ""); err != nil {
		panic(err)
	}
	return w
}

func (w *world) fail(format string, args ...any) {
	if w.failure == nil {
		w.failure = fmt.Errorf(format, args...)
	}
}

// process returns a living process with that number.
func (w *world) process(n int) *process {
	if p := w.processes[n]; p != nil {
		return p
	}
	p := &process{w: w, n: n, dead: make(chan struct{}), awake: make(chan struct{})}
	close(p.awake)
	p.life, p.end = context.WithCancel(klog.NewContext(context.Background(), klog.Logger{}))
	own := aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
		return aws.Credentials{AccessKeyID: "test", SecretAccessKey: "test"}, nil
	})
	clients, err := backend.NewClients(w.config, backend.WithMiddleware(p.install), backend.WithCredentials(own))
	if err != nil {
		panic(err)
	}
	p.s3 = clients
	validator, err := backend.NewBuckets(clients, nil)
	if err != nil {
		panic(err)
	}
	p.Provisioner, err = provision.New(provision.Options{
		Config: w.config, Clients: clients, Buckets: validator, Sessions: &identitytest.Sessions{}, DriverName: "s3.csi.driver", ClusterID: "model",
		Workers: 2, CopyWorkers: 2, CopyThreshold: threshold,
	})
	if err != nil {
		panic(err)
	}
	w.running.Go(func() { _ = p.Run(p.life) })
	w.processes[n] = p
	return p
}

// kill ends a process. Its requests may still be carried out.
func (w *world) kill(p *process) {
	w.mu.Lock()
	close(p.dead)
	w.mu.Unlock()
	p.end()
	w.processes[p.n] = nil
	for _, c := range w.calls {
		c.killed = c.killed || c.p == p
	}
	w.settle()
}

// install makes the process send its requests to the world.
func (p *process) install(s *middleware.Stack) error {
	handle := func(ctx context.Context, in middleware.DeserializeInput, _ middleware.DeserializeHandler) (
		out middleware.DeserializeOutput, _ middleware.Metadata, err error,
	) {
		req := in.Request.(*smithyhttp.Request)
		r := &request{p: p, operation: awsmiddleware.GetOperationName(ctx), http: req.Request, sent: time.Now(), answer: make(chan reply, 1)}
		r.bucket, _, _ = strings.Cut(strings.TrimPrefix(req.URL.Path, "/"), "/")
		if body := req.GetStream(); body != nil {
			if r.body, err = io.ReadAll(body); err != nil {
				return out, middleware.Metadata{}, err
			}
		}
		response, err := p.send(ctx, r)
		if err == nil {
			out.RawResponse = &smithyhttp.Response{Response: response}
		}
		return out, middleware.Metadata{}, err
	}
	return s.Deserialize.Add(middleware.DeserializeMiddlewareFunc("world", handle), middleware.After)
}

var (
	errKilled = errors.New("the process was killed")
	errCut    = errors.New("connection cut")
)

func (p *process) send(ctx context.Context, r *request) (*http.Response, error) {
	p.w.mu.Lock()
	select {
	case <-p.dead:
		p.w.mu.Unlock()
		return nil, errKilled
	default:
	}
	p.w.pending = append(p.w.pending, r)
	p.w.mu.Unlock()
	p.w.notify()
	late := time.NewTimer(responseTimeout)
	defer late.Stop()
	var err error
	select {
	case a := <-r.answer:
		return a.response, a.err
	case <-p.dead:
		err = errKilled
	case <-ctx.Done():
		err = &smithy.CanceledError{Err: ctx.Err()}
	case <-late.C:
		err = &smithyhttp.RequestSendError{Err: context.DeadlineExceeded}
	}
	p.w.mu.Lock()
	awake := p.awake
	p.w.mu.Unlock()
	select {
	case <-p.dead:
	case <-awake: // a process that was suspended finds the answer first
	}
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	select {
	case a := <-r.answer:
		return a.response, a.err
	default:
		r.gone.Store(true)
		return nil, err
	}
}

// suspend suspends all processes but one: no timeout of their requests ends. resume resumes them.
func (w *world) suspend(but int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n, p := range w.processes {
		if p != nil && n != but {
			p.awake = make(chan struct{})
		}
	}
}

func (w *world) resume() {
	w.mu.Lock()
	for _, p := range w.processes {
		if p != nil {
			select {
			case <-p.awake:
			default:
				close(p.awake)
			}
		}
	}
	w.mu.Unlock()
	w.settle()
}

func (w *world) notify() {
	select {
	case w.news <- struct{}{}:
	default:
	}
}

// call begins a call of a process. judge is called when it was answered, or the process killed.
func (w *world) call(p *process, patience time.Duration, what string, run func(context.Context) error, judge func(*call)) *call {
	c := &call{what: what, p: p, from: w.s.seq, judge: judge}
	for _, r := range w.requests() {
		if r.gone.Load() {
			c.ghosts++
		}
	}
	w.calls = append(w.calls, c)
	w.running.Go(func() {
		ctx, cancel := context.WithTimeout(p.life, patience)
		defer cancel()
		err := run(ctx)
		w.mu.Lock()
		c.answered, c.err = true, err
		w.mu.Unlock()
		w.notify()
	})
	return c
}

// settle waits until all goroutines wait, and judges the calls that have ended.
func (w *world) settle() {
	synctest.Wait()
	w.mu.Lock()
	var ended []*call
	w.calls = slices.DeleteFunc(w.calls, func(c *call) bool {
		if c.answered || c.killed {
			ended = append(ended, c)
			return true
		}
		return false
	})
	w.mu.Unlock()
	for _, c := range ended {
		c.to = w.s.seq
		c.judge(c)
	}
	// The driver relies on it that a request is carried out within buckets.RequestBound after it was sent, if at all. Where names have no generations,
	// an abandoned request must not be late at all.
	for _, r := range w.requests() {
		late := time.Since(r.sent) > buckets.RequestBound-2*slice
		switch {
		case r.gone.Load() && (late || w.own(r.bucket)):
			w.carryOut(r, nil)
		case late && !harmless(r.operation):
			w.refuse(r, &smithyhttp.RequestSendError{Err: errCut})
		}
	}
}

// harmless reports whether a request may be carried out late, because it only reads, or because it writes under a condition.
func harmless(operation string) bool {
	return operation == "PutObject" || strings.HasPrefix(operation, "Get") || strings.HasPrefix(operation, "Head") || strings.HasPrefix(operation, "List")
}

// own reports whether a bucket can be a volume.
func (w *world) own(bucket string) bool { return bucket != shared && bucket != snaps }

// requests returns the pending requests, in an order that does not depend on the scheduler.
func (w *world) requests() []*request {
	w.mu.Lock()
	defer w.mu.Unlock()
	slices.SortStableFunc(w.pending, func(a, b *request) int {
		if c := a.sent.Compare(b.sent); c != 0 {
			return c
		}
		return strings.Compare(a.String(), b.String())
	})
	return slices.Clone(w.pending)
}

func (w *world) drop(r *request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pending = slices.DeleteFunc(w.pending, func(other *request) bool { return other == r })
}

// carryOut carries out a request. lost is what the process gets instead of the answer; nil: it gets the answer.
//
// The tags of a bucket cannot be written under a condition, so that what a process does directly after it has read them must not be delayed.
func (w *world) carryOut(r *request, lost error) {
	w.drop(r)
	w.s.by = r.p
	w.sent[r.operation]++
	a := fails(http.StatusForbidden, "AccessDenied")
	if slices.Contains(w.lacking, r.operation) {
		a = fails(http.StatusNotImplemented, "NotImplemented")
	} else if !slices.Contains(w.denied, r.operation) {
		a = w.s.do(r.operation, r.http, r.body)
	}
	w.s.by = nil
	debug("%6d %s: %d %s", w.s.seq, r, a.status, a.code)
	r.answer <- reply{a.response(r.http), lost}
	if r.operation != "GetBucketTagging" || !w.own(r.bucket) || lost != nil {
		return
	}
	synctest.Wait()
	direct := []string{"PutBucketTagging", "DeleteBucket", "DeleteObjects", "AbortMultipartUpload"}
	for _, next := range w.requests() {
		if next.p == r.p && next.bucket == r.bucket && !next.gone.Load() && slices.Contains(direct, next.operation) {
			w.carryOut(next, nil)
		}
	}
}

// refuse answers a request without carrying it out.
func (w *world) refuse(r *request, err error) {
	w.drop(r)
	debug("%6d %s: %v", w.s.seq, r, err)
	r.answer <- reply{err: err}
}

// slice is a step of the clock.
const slice = 5 * time.Second

// await waits for a request or an answer, up to a limit of time, and reports whether there was one.
func (w *world) await(limit time.Duration) bool {
	for end := time.Now().Add(limit); ; {
		select {
		case <-w.news:
			w.settle()
			return true
		case <-time.After(max(0, min(slice, time.Until(end)))):
		}
		w.settle()
		if !time.Now().Before(end) {
			return false
		}
	}
}

// sleep lets time pass, in which no request is carried out.
func (w *world) sleep(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		time.Sleep(min(slice, time.Until(end)))
		w.settle()
	}
}

// quiet carries out all requests until there are no more, and until all calls have ended.
func (w *world) quiet() {
	for n := 0; w.failure == nil; n++ {
		w.settle()
		if list := w.requests(); len(list) > 0 {
			w.carryOut(list[0], nil)
		} else if !w.await(4 * time.Minute) {
			return
		}
		if n > 20000 {
			w.fail("the work has no end: %v", w.requests())
		}
	}
}

// close ends all processes.
func (w *world) close() {
	for _, p := range w.processes {
		if p != nil {
			w.kill(p)
		}
	}
	w.running.Wait()
}
