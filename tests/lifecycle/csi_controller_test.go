package lifecycle_test

// What the CSI specification asks of the Controller service and csi-sanity does not check.

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/rig"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
)

// startController starts a controller on a server of its own.
func startController(t *testing.T, flags ...string) (*rigtest.Server, connection, *process) {
	t.Helper()
	s := rigtest.StartServer(t, s3server.Options{})
	endpoint, _ := socket(t)
	p := launch(t, environment(s), append([]string{"controller", "--endpoint=" + endpoint, "--v=5"}, flags...)...)
	c := dial(t, endpoint)
	p.ready(t, c)
	return s, c, p
}

// withinLimits holds a volume against the size limits of the specification.
func withinLimits(t *testing.T, v *csi.Volume) {
	t.Helper()
	id := v.GetVolumeId()
	if id == "" || len(id) > 128 || !utf8.ValidString(id) {
		t.Errorf("volume_id %q has %d bytes, 1 to 128 of UTF-8 are allowed", id, len(id))
	}
	for _, r := range id {
		if r <= ' ' || r > '~' {
			t.Errorf("volume_id %q holds %U: COs put ids into file names, labels and logs", id, r)
		}
	}
	size := 0
	for key, value := range v.GetVolumeContext() {
		size += len(key) + len(value)
	}
	if size > 4096 {
		t.Errorf("volume_context has %d bytes, 4096 are allowed", size)
	}
}

func TestVolumeIDsStayWithinLimitsWhateverTheName(t *testing.T) {
	t.Parallel()
	s, c, _ := startController(t)
	long := strings.Repeat("b", 63)
	if _, err := s.S3.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String(long)}); err != nil {
		t.Fatal(err)
	}
	ids := map[string]string{}
	for _, name := range []string{
		"a", "pvc-0b4f3c1e-7d0a-4c0d-9d4e-111111111111", strings.Repeat("n", 128), strings.Repeat("ü", 64), strings.Repeat("n", 127) + "m",
		"Großer Name / mit : allem @2 ${x} \\ \" ' %", "..", ".", "/", "@", "-", "日本語", "a\tb\nc\rd", "UPPER", "upper",
	} {
		for _, parameters := range []map[string]string{
			{"bucketName": rigtest.Bucket},
			{"bucketName": long},
			{"bucketName": rigtest.Bucket, "prefix": "base/${pvc.namespace}/"},
			{"bucketNamePrefix": "pre-"},
		} {
			req := &csi.CreateVolumeRequest{Name: name, Parameters: maps.Clone(parameters), VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()}}
			req.Name = name
			req.Parameters["csi.storage.k8s.io/pvc/namespace"] = strings.Repeat("namespace", 7)
			resp, err := c.CreateVolume(rigtest.Context(t, patience), req)
			if status.Code(err) == codes.AlreadyExists && parameters["prefix"] != "" {
				continue // the same name in the same bucket, elsewhere in it
			}
			if err != nil {
				t.Errorf("name %q, parameters %v: %v", name, parameters, err)
				continue
			}
			withinLimits(t, resp.GetVolume())
			what := fmt.Sprintf("name %q, parameters %v", name, parameters)
			if other, ok := ids[resp.GetVolume().GetVolumeId()]; ok {
				t.Errorf("two volumes have the id %s: %s and %s", resp.GetVolume().GetVolumeId(), other, what)
			}
			ids[resp.GetVolume().GetVolumeId()] = what
			if again, err := c.CreateVolume(rigtest.Context(t, patience), req); err != nil || again.GetVolume().GetVolumeId() != resp.GetVolume().GetVolumeId() {
				t.Errorf("again, %s: %v, %v", what, again, err)
			}
		}
	}
	for id, what := range ids {
		if _, err := c.DeleteVolume(rigtest.Context(t, patience), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
			t.Errorf("delete, %s: %v", what, err)
		}
	}
}

func TestMalformedRequestsAreRefusedWithTheFieldAndWithoutSideEffect(t *testing.T) {
	t.Parallel()
	s, c, _ := startController(t)
	create := func(change func(*csi.CreateVolumeRequest)) error {
		req := rigtest.CreateRequest("vol")
		change(req)
		_, err := c.CreateVolume(rigtest.Context(t, patience), req)
		return err
	}
	capability := func(change func(*csi.VolumeCapability)) error {
		return create(func(r *csi.CreateVolumeRequest) { change(r.VolumeCapabilities[0]) })
	}
	big := strings.Repeat("x", 4097)
	flags := make([]string, 50)
	for i := range flags {
		flags[i] = fmt.Sprintf("option-%d=%s", i, strings.Repeat("x", 90))
	}
	for name, try := range map[string]struct {
		err  error
		says string
	}{
		"name with a control character": {create(func(r *csi.CreateVolumeRequest) { r.Name = "a\x01b" }), "name"},
		"name with a C1 control":        {create(func(r *csi.CreateVolumeRequest) { r.Name = "a\u0085b" }), "name"},
		"name is too long":              {create(func(r *csi.CreateVolumeRequest) { r.Name = strings.Repeat("x", 129) }), "name"},
		"parameters are too large":      {create(func(r *csi.CreateVolumeRequest) { r.Parameters["x"] = big }), "parameters"},
		"secrets are too large":         {create(func(r *csi.CreateVolumeRequest) { r.Secrets = map[string]string{"accessKeyID": big} }), "secrets"},
		"flags are too large":           {create(func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = rig.Writer(flags...) }), "mount_flags"},
		"fs_type is too long":           {capability(func(v *csi.VolumeCapability) { v.GetMount().FsType = strings.Repeat("x", 129) }), "fs_type"},
		"unknown access mode":           {capability(func(v *csi.VolumeCapability) { v.AccessMode.Mode = 99 }), "access_mode"},
		"no access type":                {capability(func(v *csi.VolumeCapability) { v.AccessType = nil }), "access_type"},
		"a block volume":                {capability(func(v *csi.VolumeCapability) { v.AccessType = &csi.VolumeCapability_Block{} }), "block"},
		"a negative size":               {create(func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: -1} }), "required_bytes"},
		"more than the limit": {create(func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}
		}), "capacity_range"},
		"mutable parameters":            {create(func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"a": "b"} }), "mutable_parameters"},
		"a snapshot as source":          {create(func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = &csi.VolumeContentSource{} }), "volume_content_source"},
		"misspelt parameter":            {create(func(r *csi.CreateVolumeRequest) { r.Parameters["onDelet"] = "purge" }), `onDelete`},
		"bad onDelete":                  {create(func(r *csi.CreateVolumeRequest) { r.Parameters["onDelete"] = "perhaps" }), "onDelete"},
		"bad bucket name":               {create(func(r *csi.CreateVolumeRequest) { r.Parameters["bucketName"] = "Not_A_Bucket" }), "bucketName"},
		"prefix of the driver's own":    {create(func(r *csi.CreateVolumeRequest) { r.Parameters["prefix"] = ".s3-csi/" }), "prefix"},
		"prefix that climbs":            {create(func(r *csi.CreateVolumeRequest) { r.Parameters["prefix"] = "a/../b/" }), "prefix"},
		"injected option":               {create(func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = rig.Writer("-o", "allow_other") }), "mount_flags[0]"},
		"injected option in parameters": {create(func(r *csi.CreateVolumeRequest) { r.Parameters["mountOptions"] = "debug,--config /etc/passwd extra" }), "mountOptions"},
	} {
		if status.Code(try.err) != codes.InvalidArgument || !strings.Contains(try.err.Error(), try.says) {
			t.Errorf("%s: %v, want InvalidArgument that says %q", name, try.err, try.says)
		}
		if len(status.Convert(try.err).Message()) > 4096 {
			t.Errorf("%s: the message has %d bytes", name, len(status.Convert(try.err).Message()))
		}
	}
	_, err := c.CreateVolume(rigtest.Context(t, patience), &csi.CreateVolumeRequest{
		Name: "vol", Parameters: map[string]string{"bucketName": rigtest.Bucket, "backend": "nowhere"}, VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()},
	})
	hasCode(t, err, codes.FailedPrecondition, "nowhere")
	if keys := s.Keys(t, rigtest.Bucket, ""); len(keys) > 0 {
		t.Errorf("refused requests left objects: %v", keys)
	}
	if buckets := s.Buckets(t); len(buckets) != 1 {
		t.Errorf("refused requests left buckets: %v", buckets)
	}
}

func TestTheSameRequestHasTheSameAnswerForEver(t *testing.T) {
	t.Parallel()
	s, c, p := startController(t)
	req := rigtest.CreateRequest("vol", "uid", "1000", "gid", "2000", "dirMode", "0750", "fileMode", "0640", "client", rigtest.Client, "mountOptions", "debug,transfers=2",
		"csi.storage.k8s.io/pvc/name", "claim", "csi.storage.k8s.io/pvc/namespace", "default", "csi.storage.k8s.io/pv/name", "vol")
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: 1 << 30, LimitBytes: 2 << 30}
	first, err := c.CreateVolume(rigtest.Context(t, patience), req)
	if err != nil {
		t.Fatal(err)
	}
	v := first.GetVolume()
	withinLimits(t, v)
	if got := v.GetCapacityBytes(); got < 1<<30 || got > 2<<30 {
		t.Errorf("capacity_bytes %d is not within the range asked for", got)
	}
	p.signal(t, endSignal)
	p.exit(t)
	endpoint, _ := socket(t)
	next := launch(t, environment(s), "controller", "--endpoint="+endpoint)
	c = dial(t, endpoint)
	next.ready(t, c)
	for range 3 {
		again, err := c.CreateVolume(rigtest.Context(t, patience), req)
		if err != nil || again.GetVolume().GetVolumeId() != v.GetVolumeId() || again.GetVolume().GetCapacityBytes() != v.GetCapacityBytes() ||
			!maps.Equal(again.GetVolume().GetVolumeContext(), v.GetVolumeContext()) {
			t.Errorf("%v, %v: want %v", again, err, first)
		}
	}
	confirm := &csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.GetVolumeId(), VolumeContext: v.GetVolumeContext(), VolumeCapabilities: req.GetVolumeCapabilities(), Parameters: req.GetParameters()}
	if resp, err := c.ValidateVolumeCapabilities(rigtest.Context(t, patience), confirm); err != nil || resp.GetConfirmed() == nil {
		t.Errorf("its own answer is not confirmed: %v, %v", resp, err)
	}
	confirm.VolumeCapabilities = []*csi.VolumeCapability{{AccessMode: rig.Writer().GetAccessMode(), AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}}
	if resp, err := c.ValidateVolumeCapabilities(rigtest.Context(t, patience), confirm); err != nil || resp.GetConfirmed() != nil || resp.GetMessage() == "" {
		t.Errorf("a block volume is confirmed: %v, %v", resp, err)
	}
	for name, change := range map[string]func(*csi.CreateVolumeRequest){
		"another size":         func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: 3 << 30} },
		"another uid":          func(r *csi.CreateVolumeRequest) { r.Parameters["uid"] = "1001" },
		"another base prefix":  func(r *csi.CreateVolumeRequest) { r.Parameters["prefix"] = "elsewhere/" },
		"another mount option": func(r *csi.CreateVolumeRequest) { r.Parameters["mountOptions"] = "debug" },
	} {
		other := rigtest.CreateRequest("vol")
		other.CapacityRange, other.Parameters = req.GetCapacityRange(), maps.Clone(req.GetParameters())
		change(other)
		_, err := c.CreateVolume(rigtest.Context(t, patience), other)
		if status.Code(err) != codes.AlreadyExists {
			t.Errorf("%s: %v, want AlreadyExists", name, err)
		}
	}
}

// Of two requests for one volume the one that comes second is told so at once, and the other one goes on.
func TestARequestForAVolumeThatIsBeingMadeIsAborted(t *testing.T) {
	t.Parallel()
	s := startStuck(t)
	other := make(chan error, 1)
	go func() {
		_, err := s.connection.CreateVolume(rigtest.Context(t, time.Minute), rigtest.CreateRequest("stuck"))
		other <- err
	}()
	running := other
	select {
	case err := <-other:
		hasCode(t, err, codes.Aborted, "stuck")
		running = s.answer
	case err := <-s.answer: // both were on their way: this one was overtaken
		hasCode(t, err, codes.Aborted, "stuck")
	case <-time.After(5 * time.Second):
		t.Fatal("neither of two requests for one volume is told that the other one is running")
	}
	s.resume()
	if err := <-running; err != nil {
		t.Errorf("the running request: %v", err)
	}
	rigtest.Create(t, s.connection, "stuck")
}

func TestAVolumeThatIsNotOursIsNeverDeleted(t *testing.T) {
	t.Parallel()
	s, c, _ := startController(t)
	s.Put(t, rigtest.Bucket, "somebody/file", "precious")
	s.Put(t, rigtest.Bucket, "vol/file", "precious")
	for handle, want := range map[string]codes.Code{
		"default:" + rigtest.Bucket + "/somebody/":      codes.FailedPrecondition, // data without a record
		"default:" + rigtest.Bucket:                     codes.FailedPrecondition, // a bucket without our tags
		rigtest.Bucket + "/somebody":                    codes.FailedPrecondition, // another driver's handle
		"pvc-0b4f3c1e-7d0a-4c0d-9d4e-111111111111":      codes.FailedPrecondition,
		"default:" + rigtest.Bucket + "/absent/":        codes.OK,
		"default:no-such-bucket-here":                   codes.OK,
		"default:" + rigtest.Bucket + "/a/../somebody/": codes.OK, // not an id that this driver can have made
		"default:" + rigtest.Bucket + "/somebody":       codes.OK,
		"nowhere:" + rigtest.Bucket + "/somebody/":      codes.FailedPrecondition, // a backend that the config has lost
		"fake-vol-id":                         codes.OK,
		"":                                    codes.InvalidArgument,
		"default:" + strings.Repeat("x", 121): codes.InvalidArgument,
	} {
		_, err := c.DeleteVolume(rigtest.Context(t, patience), &csi.DeleteVolumeRequest{VolumeId: handle})
		if status.Code(err) != want {
			t.Errorf("delete %q: %v, want %s", handle, err, want)
		}
	}
	// A volume cannot be made where somebody's data is.
	_, err := c.CreateVolume(rigtest.Context(t, patience), rigtest.CreateRequest("vol"))
	hasCode(t, err, codes.AlreadyExists, "vol")
	for _, key := range []string{"somebody/file", "vol/file"} {
		if got := s.Object(t, rigtest.Bucket, key); got != "precious" {
			t.Errorf("%s: %q", key, got)
		}
	}
}

func TestRefusedCredentialsAndAbsentBucketsHaveTheirCodes(t *testing.T) {
	t.Parallel()
	s := rigtest.StartServer(t, s3server.Options{})
	nobody, err := s.AddUser(t.Context(), "nobody", "")
	if err != nil {
		t.Fatal(err)
	}
	for name, try := range map[string]struct {
		key, secret, bucket string
		want                codes.Code
	}{
		"no such bucket": {s.Process.Keys().AccessKeyID, s.Process.Keys().SecretAccessKey, "no-such-bucket", codes.FailedPrecondition},
		"no rights":      {nobody.AccessKeyID, nobody.SecretAccessKey, rigtest.Bucket, codes.PermissionDenied},
		"no such key":    {"AKIANOBODYKNOWSTHIS01", "x", rigtest.Bucket, codes.Unauthenticated},
		"wrong secret":   {s.Process.Keys().AccessKeyID, "x", rigtest.Bucket, codes.Unauthenticated},
	} {
		t.Run(name, func(t *testing.T) {
			endpoint, _ := socket(t)
			p := launch(t, append(environment(s), "AWS_ACCESS_KEY_ID="+try.key, "AWS_SECRET_ACCESS_KEY="+try.secret), "controller", "--endpoint="+endpoint)
			c := dial(t, endpoint)
			p.ready(t, c)
			_, err := c.CreateVolume(rigtest.Context(t, patience), rigtest.CreateRequest("vol", "bucketName", try.bucket))
			hasCode(t, err, try.want, try.bucket)
		})
	}
}
