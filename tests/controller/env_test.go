package controller

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// env is a server and a bucket in it.
type env struct {
	target
	t      testing.TB
	bucket string
	s3     *s3.Client // of the test itself; no hook sees its requests
}

func newEnv(t testing.TB, target target) *env {
	t.Helper()
	e := &env{target: target, t: t, bucket: "b-" + strings.ToLower(rand.Text()[:16])}
	config := e.config("")
	clients, err := backend.NewClients(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(clients.Close)
	be, err := config.Backend("lab")
	if err != nil {
		t.Fatal(err)
	}
	if e.s3, err = clients.S3(t.Context(), be, e.root, ""); err != nil {
		t.Fatal(err)
	}
	e.makeBucket(e.bucket)
	return e
}

// in is the same server with another bucket.
func (e *env) in(bucket string) *env {
	other := *e
	other.bucket = bucket
	return &other
}

// config is the driver's config file, with more settings of the backend ("singleController: true").
func (e *env) config(settings string) *backend.Config {
	e.t.Helper()
	text := fmt.Sprintf("backends:\n  lab:\n    endpoint: %s\n    region: %s\n    addressing: path\n    controllerCredentials: secret\n", e.endpoint, e.region)
	if e.sts != "" {
		text += "    sts: " + e.sts + "\n"
	}
	if settings != "" {
		text += "    " + settings + "\n"
	}
	config, err := backend.ParseConfig([]byte(text), "", "")
	if err != nil {
		e.t.Fatal(err)
	}
	return config
}

// process is a controller process: a Provisioner that knows nothing of others.
type process struct {
	*provision.Provisioner
	e       *env
	clients *backend.Clients
	buckets *backend.Buckets
	role    string // that its requests' secrets name
	hooks   *hooks
	// sessions are those that the process has asked for.
	sessions *sessions
	stop     func() // ends Run and waits for it
	life     context.Context
	kill     func() // ends all that the process does, as if it had died
}

// process starts a controller process.
func (e *env) process(changes ...func(*processOptions)) *process {
	e.t.Helper()
	o := processOptions{driver: "s3.csi.driver", cluster: "test", run: true, runs: 2, workers: 4}
	for _, option := range changes {
		option(&o)
	}
	h := &hooks{}
	if o.config == nil {
		o.config = e.config(o.settings)
	}
	options := []backend.Option{backend.WithMiddleware(h.install)}
	if own := o.driverKeys; !own.IsZero() {
		options = append(options, backend.WithCredentials(aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: own.AccessKeyID, SecretAccessKey: own.SecretAccessKey, SessionToken: own.SessionToken}, nil
		})))
	}
	clients, err := backend.NewClients(o.config, options...)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(clients.Close)
	buckets, err := backend.NewBuckets(clients, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	maker := session.NewMaker("test").WithBackoff(50 * time.Millisecond)
	e.t.Cleanup(maker.Close)
	made := &sessions{Planner: session.NewPlanner(clients), maker: maker}
	p, err := provision.New(provision.Options{
		Config: o.config, Clients: clients, Buckets: buckets, Sessions: made, DriverName: o.driver, ClusterID: o.cluster, Runs: o.runs, Workers: o.workers,
		CopyLag: max(o.copyLag, time.Millisecond), CopyCheckEvery: o.checkEvery, ClockSkew: max(o.clockSkew, time.Nanosecond),
	})
	if err != nil {
		e.t.Fatal(err)
	}
	pr := &process{Provisioner: p, e: e, clients: clients, buckets: buckets, hooks: h, sessions: made, stop: func() {}}
	pr.life, pr.kill = context.WithCancel(context.Background())
	e.t.Cleanup(pr.kill)
	if o.run {
		pr.start()
	}
	return pr
}

func (p *process) start() {
	ctx, cancel := context.WithCancel(p.life)
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			p.e.t.Errorf("Run: %v", err)
		}
	})
	p.e.t.Cleanup(p.stop)
}

type processOptions struct {
	driver, cluster, settings string
	config                    backend.Configured // nil: of settings
	run                       bool
	runs, workers             int
	driverKeys                credentials.Keys // the process's own; zero: none
	checkEvery                time.Duration    // see copier.Options; 0: the default
	copyLag                   time.Duration    // see provision.Options; 0: hardly any
	clockSkew                 time.Duration    // see snapshot.Options; 0: hardly any
}

func settings(s string) func(*processOptions) { return func(o *processOptions) { o.settings = s } }
func cluster(s string) func(*processOptions)  { return func(o *processOptions) { o.cluster = s } }
func notRunning(o *processOptions)            { o.run = false }

// params are the parameters of a prefix volume in the env's bucket, and more ("onDelete", "purge", …).
func (e *env) params(name string, pairs ...string) volume.Parameters {
	e.t.Helper()
	m := map[string]string{"backend": "lab", "bucketName": e.bucket}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
		if pairs[i+1] == "" {
			delete(m, pairs[i])
		}
	}
	p, err := volume.ParseParameters(m, name)
	if err != nil {
		e.t.Fatal(err)
	}
	return p
}

// ask asks for a volume once.
func (p *process) ask(name string, pairs ...string) (volume.ID, error) {
	ctx, cancel := context.WithTimeout(p.life, time.Minute)
	defer cancel()
	return p.Create(ctx, provision.CreateRequest{Name: name, Parameters: p.e.params(name, pairs...), Keys: p.e.keys, RoleARN: p.role})
}

// create makes a volume that must come to be.
func (p *process) create(name string, pairs ...string) volume.ID {
	p.e.t.Helper()
	id, err := p.ask(name, pairs...)
	if err != nil {
		p.e.t.Fatalf("creating %s %v: %v", name, pairs, err)
	}
	return id
}

// tryCreate is ask without the id.
func (p *process) tryCreate(name string, pairs ...string) error {
	_, err := p.ask(name, pairs...)
	return err
}

// settled creates a volume, again while the answer is Busy, as a provisioner does.
func (p *process) settled(name string, pairs ...string) (volume.ID, error) {
	for {
		id, err := p.ask(name, pairs...)
		if !fault.Is(err, fault.Busy) {
			return id, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// delete deletes a volume for good.
func (p *process) delete(id volume.ID) {
	p.e.t.Helper()
	if err := p.tryDelete(id); err != nil {
		p.e.t.Fatalf("deleting %s: %v", id, err)
	}
}

func (p *process) tryDelete(id volume.ID) error {
	ctx, cancel := context.WithTimeout(p.life, time.Minute)
	defer cancel()
	return p.Delete(ctx, provision.DeleteRequest{ID: id, Keys: p.e.keys, RoleARN: p.role})
}

func (p *process) lookup(id volume.ID) error {
	return p.Lookup(p.e.ctx(), provision.LookupRequest{ID: id, Keys: p.e.keys, RoleARN: p.role})
}

// lookupPlace looks for what a node could mount.
func (p *process) lookupPlace(id volume.ID) error {
	return p.LookupPlace(p.e.ctx(), provision.LookupRequest{ID: id, Keys: p.e.keys, RoleARN: p.role})
}

// there fails the test unless the volume is.
func (p *process) there(id volume.ID) {
	p.e.t.Helper()
	if err := p.lookup(id); err != nil {
		p.e.t.Errorf("looking %s up: %v", id, err)
	}
}

func (e *env) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	e.t.Cleanup(cancel)
	return ctx
}

// want fails the test unless err has that kind and its text holds all the words.
func (e *env) want(err error, kind fault.Kind, words ...string) {
	e.t.Helper()
	canaries.check(e.t, fmt.Sprint(err))
	if !fault.Is(err, kind) {
		e.t.Fatalf("error of kind %d: %v; want kind %d", fault.KindOf(err), err, kind)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			e.t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

// notFinal fails the test if err is final, so that the caller would not retry.
func (e *env) notFinal(what string, err error) {
	e.t.Helper()
	if slices.Contains([]fault.Kind{fault.Invalid, fault.NotFound, fault.Exists, fault.Precondition, fault.Denied}, fault.KindOf(err)) {
		e.t.Errorf("%s: a final error: %v", what, err)
	}
}

// makeBucket makes a bucket that is emptied and removed after the test.
func (e *env) makeBucket(name string) {
	e.t.Helper()
	if _, err := e.s3.CreateBucket(e.ctx(), &s3.CreateBucketInput{Bucket: &name}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) removeBucket() {
	e.t.Helper()
	if _, err := e.s3.DeleteBucket(e.ctx(), &s3.DeleteBucketInput{Bucket: &e.bucket}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) setVersioning(bucket string, status types.BucketVersioningStatus) {
	e.t.Helper()
	_, err := e.s3.PutBucketVersioning(e.ctx(), &s3.PutBucketVersioningInput{Bucket: &bucket,
		VersioningConfiguration: &types.VersioningConfiguration{Status: status}})
	if err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) put(keys ...string) {
	e.t.Helper()
	ctx := e.ctx()
	var wg sync.WaitGroup
	next := make(chan string)
	for range 8 {
		wg.Go(func() {
			for key := range next {
				body := "x"
				if strings.HasSuffix(key, "/") {
					body = "" // versitygw keeps directories' objects as directories
				}
				if _, err := e.s3.PutObject(ctx, &s3.PutObjectInput{Bucket: &e.bucket, Key: &key, Body: strings.NewReader(body)}); err != nil {
					e.t.Errorf("putting %q: %v", key, err)
				}
			}
		})
	}
	for _, key := range keys {
		next <- key
	}
	close(next)
	wg.Wait()
}

func (e *env) remove(key string) {
	e.t.Helper()
	if _, err := e.s3.DeleteObject(e.ctx(), &s3.DeleteObjectInput{Bucket: &e.bucket, Key: &key}); err != nil {
		e.t.Fatal(err)
	}
}

// upload begins an upload and leaves it.
func (e *env) upload(key string) {
	e.t.Helper()
	if _, err := e.s3.CreateMultipartUpload(e.ctx(), &s3.CreateMultipartUploadInput{Bucket: &e.bucket, Key: &key}); err != nil {
		e.t.Fatal(err)
	}
}

// uploads are the keys of all unfinished uploads.
func (e *env) uploads() []string {
	e.t.Helper()
	out, err := e.s3.ListMultipartUploads(e.ctx(), &s3.ListMultipartUploadsInput{Bucket: &e.bucket})
	if err != nil {
		e.t.Fatal(err)
	}
	keys := []string{}
	for _, u := range out.Uploads {
		keys = append(keys, *u.Key)
	}
	slices.Sort(keys)
	return keys
}

// keysBelow are the current objects below a prefix.
func (e *env) keysBelow(prefix string) []string {
	e.t.Helper()
	return (&rigtest.Server{S3: e.s3}).Keys(e.t, e.bucket, prefix)
}

// volumes are the records of volumes.
func (e *env) volumes() []string { return e.keysBelow(".s3-csi/volumes/") }

// versions are the versions and delete markers below a prefix.
func (e *env) versions(prefix string) (list []string) {
	e.t.Helper()
	pages := s3.NewListObjectVersionsPaginator(e.s3, &s3.ListObjectVersionsInput{Bucket: &e.bucket, Prefix: &prefix})
	for pages.HasMorePages() {
		page, err := pages.NextPage(e.ctx())
		if err != nil {
			e.t.Fatal(err)
		}
		for _, v := range page.Versions {
			list = append(list, *v.Key+" "+*v.VersionId)
		}
		for _, m := range page.DeleteMarkers {
			list = append(list, *m.Key+" marker "+*m.VersionId)
		}
	}
	return list
}

// record is the text of a volume's record, "" for none.
func (e *env) record(segment string) string {
	e.t.Helper()
	key := ".s3-csi/volumes/" + segment
	out, err := e.s3.GetObject(e.ctx(), &s3.GetObjectInput{Bucket: &e.bucket, Key: &key})
	if backend.IsNotFound(err) {
		return ""
	}
	if err != nil {
		e.t.Fatal(err)
	}
	defer out.Body.Close()
	text, err := io.ReadAll(out.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	return string(text)
}

// state fails the test unless the volume's record has that state.
func (e *env) state(segment, state string) {
	e.t.Helper()
	if r := e.record(segment); !strings.Contains(r, `"state": "`+state+`"`) {
		e.t.Errorf("the record of %s is not %s: %s", segment, state, r)
	}
}

func (e *env) same(what string, got, want []string) {
	e.t.Helper()
	if !slices.Equal(got, want) {
		e.t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func (e *env) bucketTags(bucket string) map[string]string {
	e.t.Helper()
	out, err := e.s3.GetBucketTagging(e.ctx(), &s3.GetBucketTaggingInput{Bucket: &bucket})
	if backend.IsNotFound(err) {
		return nil
	}
	if err != nil {
		e.t.Fatal(err)
	}
	tags := map[string]string{}
	for _, tag := range out.TagSet {
		tags[aws.ToString(tag.Key)] = aws.ToString(tag.Value)
	}
	return tags
}

// retag changes some tags of a bucket; "" takes one away.
func (e *env) retag(bucket string, changes map[string]string) {
	e.t.Helper()
	tags := map[string]string{}
	maps.Copy(tags, e.bucketTags(bucket))
	maps.Copy(tags, changes)
	set := []types.Tag{}
	for key, value := range tags {
		if value != "" {
			set = append(set, types.Tag{Key: aws.String(key), Value: aws.String(value)})
		}
	}
	if _, err := e.s3.PutBucketTagging(e.ctx(), &s3.PutBucketTaggingInput{Bucket: &bucket, Tagging: &types.Tagging{TagSet: set}}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) bucketExists(bucket string) bool {
	e.t.Helper()
	_, err := e.s3.HeadBucket(e.ctx(), &s3.HeadBucketInput{Bucket: &bucket})
	if err != nil && !backend.IsNotFound(err) {
		e.t.Fatal(err)
	}
	return err == nil
}

// gone fails the test if the bucket is there.
func (e *env) gone(bucket string) {
	e.t.Helper()
	if e.bucketExists(bucket) {
		e.t.Errorf("bucket %s is there", bucket)
	}
}

// numbered are n keys below a prefix.
func numbered(prefix string, n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("%sd%02d/f%05d", prefix, i%7, i)
	}
	return keys
}
