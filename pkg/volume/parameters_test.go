package volume

import (
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"
)

const pvc = "pvc-" + uuid

// with is base and more, for tables of requests that differ in one key.
func with(base map[string]string, pairs ...string) map[string]string {
	m := maps.Clone(base)
	if m == nil {
		m = map[string]string{}
	}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return m
}

func metadata() map[string]string {
	return map[string]string{
		"csi.storage.k8s.io/pvc/namespace": "team-a",
		"csi.storage.k8s.io/pvc/name":      "data",
		"csi.storage.k8s.io/pv/name":       pvc,
	}
}

func TestParseParametersReadsEveryParameter(t *testing.T) {
	given := map[string]string{
		"backend":             "minio",
		"bucketName":          "shared",
		"prefix":              "volumes",
		"onDelete":            "retain",
		"expectedBucketOwner": "111122223333",
		"client":              "rclone",
		"credentials":         "secret",
		"uid":                 "1000",
		"gid":                 "0",
		"dirMode":             "0750",
		"fileMode":            "640",
		"readOnly":            "true",
		"mountOptions":        "allow-delete,--uid=7",
		"memoryLimit":         "1Gi",
		"cpuWeight":           "50",
		"tasksMax":            "512",
		"cache":               "true",
		"cacheSize":           "20Gi",
		"roleARN":             "arn:minio:iam:::role/${pod.namespace}",
		"scope":               "auto",
		"sessionDuration":     "1h",
		"consistency":         "relaxed",
		"linger":              "10m",
		"usage":               "6h",
		"maxObjects":          "7",
		"snapshotAccess":      "direct",
		"maxBytes":            "2Gi",
	}
	got, err := ParseParameters(with(given, "csi.storage.k8s.io/pvc/name", "data", "csi.storage.k8s.io/something-new", "x"), pvc)
	must(t, err)
	want := Parameters{
		Backend: "minio", BucketName: "shared", Prefix: "volumes/", Mutable: Mutable{OnDelete: OnDeleteRetain, Usage: Usage(6 * time.Hour)},
		MaxObjects: 7, MaxBytes: 2 << 30, SnapshotAccess: SnapshotAccessDirect,
		Node: Attributes{
			Client: "rclone", Credentials: "secret", UID: new(uint32(1000)), GID: new(uint32(0)), DirMode: new(uint32(0o750)), FileMode: new(uint32(0o640)),
			ReadOnly: true, ExpectedBucketOwner: "111122223333",
			MountOptions: []Option{{Name: "allow-delete"}, {"uid", "7", true}},
			MemoryLimit:  1 << 30, CPUWeight: 50, TasksMax: 512, Cache: true, CacheSize: 20 << 30,
			RoleARN: "arn:minio:iam:::role/${pod.namespace}", Scope: ScopeAuto, SessionDuration: time.Hour, Consistency: ConsistencyRelaxed, Linger: 10 * time.Minute,
			Usage: Usage(6 * time.Hour),
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	for _, doc := range ParameterDocs() {
		if _, ok := given[doc.Name]; !ok && doc.Scope != ScopeContext && doc.Name != keyBucketNamePrefix && doc.Name != keyTags {
			t.Errorf("this test does not give %s", doc.Name)
		}
	}
}

func TestParseParametersWithoutAnyMakesABucketPerVolume(t *testing.T) {
	got, err := ParseParameters(nil, pvc)
	must(t, err)
	if want := (Parameters{Backend: "default", Mutable: Mutable{OnDelete: OnDeleteDelete}, MaxObjects: DefaultMaxObjects,
		MaxBytes: DefaultMaxBytes}); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
	if id := got.ID(pvc, 1); id.String() != "default:"+pvc {
		t.Errorf("id %s", id)
	}
	if len(got.Context()) != 0 {
		t.Errorf("the context holds defaults: %v", got.Context())
	}
}

func TestParseParametersRefusesBadValuesByName(t *testing.T) {
	bucket := map[string]string{"bucketName": "shared"}
	for name, tt := range map[string]struct {
		params map[string]string
		field  string
		words  []string
	}{
		"unknown with its nearest":     {with(nil, "bucketname", "b"), "parameters.bucketname", []string{"nearest is bucketName"}},
		"unknown mode":                 {with(nil, "dirmode", "0755"), "parameters.dirmode", []string{"nearest is dirMode"}},
		"k8s-csi-s3's bucket":          {with(nil, "bucket", "b"), "parameters.bucket", []string{"3 to 255"}},
		"k8s-csi-s3's mounter":         {with(nil, "mounter", "geesefs"), "parameters.mounter", []string{"client"}},
		"k8s-csi-s3's options":         {with(nil, "options", "-o x"), "parameters.options", []string{"docs/reference/migrating-settings.md"}},
		"region belongs to a backend":  {with(nil, "region", "us-east-1"), "parameters.region", nil},
		"control character in a key":   {with(nil, "a\nb", ""), "parameters.a?b", nil},
		"backend":                      {with(nil, "backend", "A B"), "parameters.backend", nil},
		"empty backend":                {with(nil, "backend", ""), "parameters.backend", nil},
		"bucket name":                  {with(nil, "bucketName", "Sha:red"), "parameters.bucketName", []string{"a-z"}},
		"empty bucket name":            {with(nil, "bucketName", ""), "parameters.bucketName", []string{"remove it"}},
		"bucket name prefix":           {with(nil, "bucketNamePrefix", "a."), "parameters.bucketNamePrefix", nil},
		"bucket name prefix with dash": {with(nil, "bucketNamePrefix", "-a"), "parameters.bucketNamePrefix", nil},
		"bucket name prefix reserved":  {with(nil, "bucketNamePrefix", "sthree-a"), "parameters.bucketNamePrefix", []string{"reserves"}},
		"bucket name prefix too long":  {with(nil, "bucketNamePrefix", strings.Repeat("a", 44)), "parameters.bucketNamePrefix", []string{"by 3 bytes"}},
		"both bucket names":            {with(bucket, "bucketNamePrefix", "a"), "parameters.bucketNamePrefix", []string{"combined with bucketName"}},
		"prefix without bucket":        {with(nil, "prefix", "a"), "parameters.prefix", []string{"requires bucketName"}},
		"onDelete":                     {with(nil, "onDelete", "Delete"), "parameters.onDelete", []string{"requireEmpty"}},
		"empty onDelete":               {with(nil, "onDelete", ""), "parameters.onDelete", nil},
		"owner too short":              {with(nil, "expectedBucketOwner", "1234"), "parameters.expectedBucketOwner", []string{"12 digits"}},
		"owner not digits":             {with(nil, "expectedBucketOwner", "11112222333a"), "parameters.expectedBucketOwner", nil},
		"client":                       {with(nil, "client", "../bin/sh"), "parameters.client", nil},
		"credentials":                  {with(nil, "credentials", "pod"), "parameters.credentials", []string{"driver", "secret"}},
		"role":                         {with(nil, "roleARN", "arn:aws:iam::1:user/x"), "parameters.roleARN", []string{"arn:aws:iam::111122223333:role/name"}},
		"empty role":                   {with(nil, "roleARN", ""), "parameters.roleARN", nil},
		"scope":                        {with(nil, "scope", "Required"), "parameters.scope", []string{"required"}},
		"session duration":             {with(nil, "sessionDuration", "1h0m0.5s"), "parameters.sessionDuration", []string{"whole seconds"}},
		"uid negative":                 {with(nil, "uid", "-1"), "parameters.uid", nil},
		"uid that means none":          {with(nil, "uid", "4294967295"), "parameters.uid", nil},
		"uid octal":                    {with(nil, "uid", "0100"), "parameters.uid", nil},
		"uid with sign":                {with(nil, "uid", "+1"), "parameters.uid", nil},
		"gid a name":                   {with(nil, "gid", "users"), "parameters.gid", nil},
		"dirMode not octal":            {with(nil, "dirMode", "0789"), "parameters.dirMode", []string{"octal"}},
		"dirMode setuid":               {with(nil, "dirMode", "4755"), "parameters.dirMode", nil},
		"fileMode with 0o":             {with(nil, "fileMode", "0o644"), "parameters.fileMode", nil},
		"fileMode too long":            {with(nil, "fileMode", "00644"), "parameters.fileMode", nil},
		"readOnly":                     {with(nil, "readOnly", "yes"), "parameters.readOnly", nil},
		"memory without a unit's name": {with(nil, "memoryLimit", "1GiB"), "parameters.memoryLimit", []string{"512Mi"}},
		"no memory":                    {with(nil, "memoryLimit", "0"), "parameters.memoryLimit", nil},
		"too little memory":            {with(nil, "memoryLimit", "15Mi"), "parameters.memoryLimit", []string{"less than 16Mi"}},
		"more memory than there is":    {with(nil, "memoryLimit", "9999999999Ti"), "parameters.memoryLimit", []string{"too large"}},
		"no CPU weight":                {with(nil, "cpuWeight", "0"), "parameters.cpuWeight", []string{"from 1 to 10000"}},
		"too much CPU weight":          {with(nil, "cpuWeight", "10001"), "parameters.cpuWeight", nil},
		"CPU weight with a sign":       {with(nil, "cpuWeight", "+1"), "parameters.cpuWeight", nil},
		"CPU weight with a zero":       {with(nil, "cpuWeight", "01"), "parameters.cpuWeight", nil},
		"too few tasks":                {with(nil, "tasksMax", "31"), "parameters.tasksMax", []string{"from 32 to 4194304"}},
		"infinitely many tasks":        {with(nil, "tasksMax", "infinity"), "parameters.tasksMax", nil},
		"cache":                        {with(nil, "cache", "/tmp"), "parameters.cache", []string{"true"}},
		"another consistency":          {with(nil, "consistency", "strong"), "parameters.consistency", []string{"close-to-open, relaxed"}},
		"no consistency":               {with(nil, "consistency", ""), "parameters.consistency", nil},
		"no linger":                    {with(nil, "linger", "0"), "parameters.linger", []string{"from 1s to 24h"}},
		"linger without a unit":        {with(nil, "linger", "600"), "parameters.linger", nil},
		"a negative linger":            {with(nil, "linger", "-1m"), "parameters.linger", nil},
		"too long a linger":            {with(nil, "linger", "24h1s"), "parameters.linger", nil},
		"usage more often than 10m":    {with(nil, "usage", "9m59s"), "parameters.usage", []string{"from 10m to 168h"}},
		"usage less often than 168h":   {with(nil, "usage", "168h1s"), "parameters.usage", nil},
		"usage without a unit":         {with(nil, "usage", "6"), "parameters.usage", nil},
		"usage that is not a duration": {with(nil, "usage", "Off"), "parameters.usage", nil},
		"no usage":                     {with(nil, "usage", ""), "parameters.usage", nil},
		"parts of a second of linger":  {with(nil, "linger", "1500ms"), "parameters.linger", nil},
		"cacheSize without cache":      {with(nil, "cacheSize", "1Gi"), "parameters.cacheSize", []string{`cache: "true"`}},
		"cacheSize with cache off":     {with(nil, "cache", "false", "cacheSize", "1Gi"), "parameters.cacheSize", nil},
		"too small a cache":            {with(nil, "cache", "true", "cacheSize", "1000K"), "parameters.cacheSize", []string{"from 1Mi to 16Ti"}},
		"too large a cache":            {with(nil, "cache", "true", "cacheSize", "17Ti"), "parameters.cacheSize", nil},
		"mount option":                 {with(nil, "mountOptions", "allow-delete,-o x"), "parameters.mountOptions[1]", nil},
		"mount option list with space": {with(nil, "mountOptions", "a, b"), "parameters.mountOptions[1]", nil},
		"mount option list with hole":  {with(nil, "mountOptions", "a,,b"), "parameters.mountOptions[1]", nil},
		"oversize":                     {with(nil, "mountOptions", "a="+strings.Repeat("x", 4096)), "parameters", []string{"4096"}},
		"prefix slash first":           {with(bucket, "prefix", "/a"), "parameters.prefix", nil},
		"prefix only slash":            {with(bucket, "prefix", "/"), "parameters.prefix", nil},
		"prefix double slash":          {with(bucket, "prefix", "a//b"), "parameters.prefix", []string{"//"}},
		"prefix dots":                  {with(bucket, "prefix", "a/../b"), "parameters.prefix", []string{".."}},
		"prefix dot":                   {with(bucket, "prefix", "./"), "parameters.prefix", nil},
		"prefix of records":            {with(bucket, "prefix", ".s3-csi/volumes/"), "parameters.prefix", []string{"records"}},
		"prefix beside records":        {with(bucket, "prefix", ".s3-csix"), "parameters.prefix", nil},
		"prefix with generation":       {with(bucket, "prefix", "a@2/"), "parameters.prefix", []string{"generation"}},
		"prefix wildcard":              {with(bucket, "prefix", "a*/"), "parameters.prefix", []string{"policy"}},
		"prefix question mark":         {with(bucket, "prefix", "a?"), "parameters.prefix", []string{"policy"}},
		"prefix dollar":                {with(bucket, "prefix", "a$b"), "parameters.prefix", []string{"policy"}},
		"prefix quote":                 {with(bucket, "prefix", `a"b`), "parameters.prefix", []string{"policy"}},
		"prefix backslash":             {with(bucket, "prefix", `a\b`), "parameters.prefix", []string{"policy"}},
		"prefix backtick":              {with(bucket, "prefix", "a`b"), "parameters.prefix", []string{"policy"}},
		"prefix newline":               {with(bucket, "prefix", "a\nb"), "parameters.prefix", nil},
		"prefix invisible":             {with(bucket, "prefix", "a\u202eb"), "parameters.prefix", nil},
		"prefix not UTF-8":             {with(bucket, "prefix", "a\xff"), "parameters.prefix", []string{"UTF-8"}},
		"prefix ends in space":         {with(bucket, "prefix", "a "), "parameters.prefix", []string{"white space"}},
		"unknown template": {with(bucket, "prefix", "${pod.name}/"), "parameters.prefix",
			[]string{"${pod.name}", "${pv.name}, ${pvc.name}, ${pvc.namespace}"}},
		"empty template":            {with(bucket, "prefix", "${}"), "parameters.prefix", []string{"${}"}},
		"open template":             {with(bucket, "prefix", "a/${pvc.name"), "parameters.prefix", []string{`without "}"`}},
		"template without metadata": {with(bucket, "prefix", "${pvc.namespace}"), "parameters.prefix", []string{"--extra-create-metadata"}},
		"prefix too long":           {with(bucket, "prefix", strings.Repeat("p", 70)), "parameters.prefix", []string{"by 4 bytes", "room for 67"}},
		"prefix too long by one":    {with(bucket, "prefix", strings.Repeat("p", 67)), "parameters.prefix", []string{"by 1 bytes"}},
		"no room for any volume": {with(nil, "backend", strings.Repeat("b", 32), "bucketName", strings.Repeat("k", 63)), "parameters.bucketName",
			[]string{"by 15 bytes"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseParameters(tt.params, pvc)
			if err == nil {
				t.Fatalf("accepted: %+v", got)
			}
			wantInvalid(t, err, tt.field, tt.words...)
		})
	}
}

func TestParseParametersRefusesNamesThatCSIDoesNotAllow(t *testing.T) {
	for _, name := range []string{"", "a\x0bb", "a\u0085", "a\x00", "\xff", strings.Repeat("n", 129)} {
		_, err := ParseParameters(nil, name)
		wantInvalid(t, err, "name")
	}
	for _, name := range []string{"..", "a/b@2", "tab\tand\r\nline", "größe 数据", strings.Repeat("n", 128)} {
		if _, err := ParseParameters(nil, name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestBasePrefixIsExpanded(t *testing.T) {
	long := strings.Repeat("n", 63)
	for name, tt := range map[string]struct {
		prefix, namespace, pvc string
		want                   string
	}{
		"none":                      {"", "team-a", "data", ""},
		"literal":                   {"a b/ü", "team-a", "data", "a b/ü/"},
		"templates":                 {"x/${pvc.namespace}/${pvc.name}", "team-a", "data", "x/team-a/data/"},
		"twice in one element":      {"${pvc.namespace}-${pvc.namespace}/", "team-a", "data", "team-a-team-a/"},
		"a value with a slash":      {"${pvc.name}", "team-a", "a/b", "a-b-" + hash("a/b") + "/"},
		"a value that climbs":       {"${pvc.name}", "team-a", "..", "v-" + hash("..") + "/"},
		"a value with a generation": {"${pvc.name}", "team-a", "a@2", "a-2-" + hash("a@2") + "/"},
		"a value like the records":  {"${pvc.name}", "team-a", ".s3-csi", "s3-csi-" + hash(".s3-csi") + "/"},
		"a value like a template":   {"${pvc.name}", "team-a", "${pv.name}", "pv.name-" + hash("${pv.name}") + "/"},
		"a value like a hashed one": {"${pvc.name}", "team-a", "x-" + hash("y"), "x-" + hash("y")[:5] + "-" + hash("x-"+hash("y")) + "/"},
		"a long value that fits":    {"${pvc.namespace}", long, "data", long + "/"},
		"the name is hashed first": {"${pvc.namespace}/${pvc.name}", "team-of-many-people-and-names", strings.Repeat("d", 50),
			"team-of-many-people-and-names/ddddddd-" + hash(strings.Repeat("d", 50)) + "/"},
		"the namespace only last": {"${pvc.namespace}/${pvc.name}", long, strings.Repeat("d", 50),
			"nnnnnnn-" + hash(long) + "/ddddddd-" + hash(strings.Repeat("d", 50)) + "/"},
		"longer than a label": {"${pvc.name}", "team-a", strings.Repeat("d", 64), "ddddddd-" + hash(strings.Repeat("d", 64)) + "/"},
	} {
		t.Run(name, func(t *testing.T) {
			params := with(metadata(), "bucketName", "shared", "prefix", tt.prefix,
				"csi.storage.k8s.io/pvc/namespace", tt.namespace, "csi.storage.k8s.io/pvc/name", tt.pvc)
			got, err := ParseParameters(params, pvc)
			must(t, err)
			if got.Prefix != tt.want {
				t.Errorf("base %q, want %q", got.Prefix, tt.want)
			}
			if _, err := ParseID(got.ID(pvc, MaxGeneration).String()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestBasePrefixTooLongEvenWhenHashedSaysByHowMuch(t *testing.T) {
	params := with(metadata(), "bucketName", "shared", "prefix", strings.Repeat("p", 40)+"/${pvc.name}", "csi.storage.k8s.io/pvc/name", strings.Repeat("d", 60))
	_, err := ParseParameters(params, pvc)
	wantInvalid(t, err, "parameters.prefix", "by 3 bytes", "room for 67")
}

func TestBasePrefixCannotBecomeTheRecords(t *testing.T) {
	params := with(metadata(), "bucketName", "shared", "prefix", ".s3-${pvc.name}", "csi.storage.k8s.io/pvc/name", "csi")
	_, err := ParseParameters(params, pvc)
	wantInvalid(t, err, "parameters.prefix", "records")
}

func TestVolumePrefixOfEachGeneration(t *testing.T) {
	p := Parameters{Backend: "default", BucketName: "shared", Prefix: "base/"}
	for generation, want := range map[int]string{1: "base/v/", 2: "base/v@2/", 9999: "base/v@9999/"} {
		if got := p.VolumePrefix("v", generation); got != want {
			t.Errorf("generation %d: %q", generation, got)
		}
	}
	if got := (Parameters{}).VolumePrefix("v", 2); got != "" {
		t.Errorf("a bucket of its own has the prefix %q", got)
	}
}

func TestBucketForMakesValidNames(t *testing.T) {
	for name, tt := range map[string]struct{ prefix, name, want string }{
		"as it is":            {"", pvc, pvc},
		"with prefix":         {"team-", "data", "team-data"},
		"capitals":            {"team-", "Data", "team-data-" + hash("Data")},
		"more capitals":       {"", "CSIVolumeName", "csivolumename-" + hash("CSIVolumeName")},
		"accented capitals":   {"", "ÄRGERE Dich", "rgere-dich-" + hash("ÄRGERE Dich")},
		"dots":                {"", "a.b", "a-b-" + hash("a.b")},
		"an address":          {"", "192.168.5.4", "192-168-5-4-" + hash("192.168.5.4")},
		"too short":           {"", "ab", "ab-" + hash("ab")},
		"too long":            {"", strings.Repeat("n", 64), strings.Repeat("n", 19) + "-" + hash(strings.Repeat("n", 64))},
		"reserved suffix":     {"", "a--x-s3", "a--x-s3-" + hash("a--x-s3")},
		"kind by its suffix":  {"", "b--usw2-az1--x-s3", "b--usw2-az1--x-s3-" + hash("b--usw2-az1--x-s3")},
		"reserved when whole": {"x", "n--abc", "xv-" + hash("n--abc")},
		"like a hashed one":   {"", "x-" + hash("y"), "x-" + hash("y")[:17] + "-" + hash("x-"+hash("y"))},
		"nothing to read":     {strings.Repeat("p", 41), "数据", strings.Repeat("p", 41) + "v-" + hash("数据")},
	} {
		got := Parameters{BucketNamePrefix: tt.prefix}.BucketFor(tt.name)
		if got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
		if kind, err := ValidateBucketName(got); err != nil || kind != BucketGeneralPurpose {
			t.Errorf("%s: %q is %q, %v", name, got, kind, err)
		}
	}
	if a, b := (Parameters{}).BucketFor("Data"), (Parameters{}).BucketFor("DATA"); a == b {
		t.Errorf("names that differ in case share the bucket %s", a)
	}
	if got := (Parameters{BucketName: "shared"}).BucketFor("x"); got != "shared" {
		t.Errorf("the given bucket became %q", got)
	}
}

func TestDigestChangesWithEveryParameter(t *testing.T) {
	shared := with(metadata(), "bucketName", "shared", "prefix", "a/")
	own := with(nil, "bucketNamePrefix", "a-")
	seen := map[string]string{}
	for name, params := range map[string]map[string]string{
		"nothing":             nil,
		"own":                 own,
		"other name prefix":   with(own, "bucketNamePrefix", "b-"),
		"shared":              shared,
		"backend":             with(shared, "backend", "minio"),
		"bucketName":          with(shared, "bucketName", "other"),
		"prefix":              with(shared, "prefix", "b/"),
		"no prefix":           with(shared, "prefix", ""),
		"template":            with(shared, "prefix", "${pvc.name}"),
		"onDelete":            with(shared, "onDelete", "retain"),
		"purge":               with(shared, "onDelete", "purge"),
		"expectedBucketOwner": with(shared, "expectedBucketOwner", "111122223333"),
		"client":              with(shared, "client", "rclone"),
		"other client":        with(shared, "client", "mountpoint-s3"),
		"credentials":         with(shared, "credentials", "driver"),
		"uid":                 with(shared, "uid", "0"),
		"other uid":           with(shared, "uid", "1"),
		"gid":                 with(shared, "gid", "0"),
		"dirMode":             with(shared, "dirMode", "0755"),
		"fileMode":            with(shared, "fileMode", "0755"),
		"readOnly":            with(shared, "readOnly", "true"),
		"mountOptions":        with(shared, "mountOptions", "a"),
		"value of an option":  with(shared, "mountOptions", "a=1"),
		"order of options":    with(shared, "mountOptions", "b,a"),
		"other order":         with(shared, "mountOptions", "a,b"),
		"memoryLimit":         with(shared, "memoryLimit", "1Gi"),
		"other memoryLimit":   with(shared, "memoryLimit", "1G"),
		"cpuWeight":           with(shared, "cpuWeight", "50"),
		"tasksMax":            with(shared, "tasksMax", "50"),
		"cache":               with(shared, "cache", "true"),
		"cacheSize":           with(shared, "cache", "true", "cacheSize", "1Gi"),
		"consistency":         with(shared, "consistency", "relaxed"),
		"other consistency":   with(shared, "consistency", "close-to-open"),
		"linger":              with(shared, "linger", "10m"),
		"other linger":        with(shared, "linger", "1h"),
		"usage":               with(shared, "usage", "6h"),
		"other usage":         with(shared, "usage", "1h"),
		"usage off":           with(shared, "usage", "off"),
	} {
		p, err := ParseParameters(params, pvc)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		digest := p.Digest()
		if !strings.HasPrefix(digest, "v1:") || len(digest) != 3+64 {
			t.Errorf("%s: digest %q", name, digest)
		}
		if other, ok := seen[digest]; ok {
			t.Errorf("%q and %q have one digest", name, other)
		}
		seen[digest] = name
	}
}

func TestDigestIgnoresSpellingAndMetadata(t *testing.T) {
	base := map[string]string{"bucketName": "shared", "prefix": "a/", "dirMode": "0755", "mountOptions": "uid=1", "memoryLimit": "2Gi"}
	want := digestOf(t, base)
	for name, params := range map[string]map[string]string{
		"metadata":         with(base, "csi.storage.k8s.io/pvc/name", "x"),
		"slash":            with(base, "prefix", "a"),
		"octal":            with(base, "dirMode", "755"),
		"dashes":           with(base, "mountOptions", "--uid 1"),
		"default spelt":    with(base, "onDelete", "delete"),
		"default backend":  with(base, "backend", "default"),
		"readOnly refused": with(base, "readOnly", "false"),
		"cache refused":    with(base, "cache", "false"),
		"quantity":         with(base, "memoryLimit", "2147483648"),
	} {
		if got := digestOf(t, params); got != want {
			t.Errorf("%s changes the digest", name)
		}
	}
}

// Digests lie in the records of volumes, so an upgrade must not change them.
func TestDigestNeverChanges(t *testing.T) {
	got := digestOf(t, map[string]string{"bucketName": "shared", "prefix": "a/", "uid": "1000", "mountOptions": "allow-delete"})
	if want := "v1:286550801550d7f5cbd766963472763cc2492bc905e5f8962c3869d47dc99c16"; got != want {
		t.Errorf("digest %s, was %s", got, want)
	}
}

func digestOf(t *testing.T, params map[string]string) string {
	t.Helper()
	p, err := ParseParameters(params, pvc)
	must(t, err)
	return p.Digest()
}

func FuzzParseParameters(f *testing.F) {
	f.Add("default", "shared", "", "base/${pvc.namespace}/${pvc.name}", "team", "data", pvc, "mountOptions", "a,--b 1")
	f.Add("minio", "", "team-", "", "", "", "My Volume", "uid", "1000")
	f.Add("default", "shared", "", "a@2/", "", "", "..", "dirMode", "0755")
	f.Add("default", "shared", "", ".s3-${pvc.name}", "", "csi", "n", "client", "rclone")
	f.Add("default", "", "x", "", "", "", "n--abc", "readOnly", "true")
	f.Add("default", "", "x", "", "", "", "n", "memoryLimit", "1500M")
	f.Add("default", "", "x", "", "", "", "n", "cache", "true")
	f.Add("default", "", "x", "", "", "", "n", "roleARN", "arn:aws:iam::1:role/a${pod.serviceAccountName}b")
	f.Add("default", "", "x", "", "", "", "n", "sessionDuration", "36h")
	f.Add("default", strings.Repeat("k", 63), "", "${pvc.namespace}", strings.Repeat("n", 63), "d", strings.Repeat("v", 128), "unknown", "")
	f.Fuzz(func(t *testing.T, backend, bucket, bucketPrefix, prefix, namespace, claim, name, key, value string) {
		params := map[string]string{"csi.storage.k8s.io/pvc/namespace": namespace, "csi.storage.k8s.io/pvc/name": claim, "csi.storage.k8s.io/pv/name": name}
		for k, v := range map[string]string{"backend": backend, "bucketName": bucket, "bucketNamePrefix": bucketPrefix, "prefix": prefix} {
			if v != "" {
				params[k] = v
			}
		}
		if _, ok := params[key]; !ok {
			params[key] = value
		}
		p, err := ParseParameters(params, name)
		if err != nil {
			wantInvalid(t, err, "")
			return
		}
		again, err := ParseParameters(params, name)
		if err != nil || !reflect.DeepEqual(p, again) || p.Digest() != again.Digest() {
			t.Fatalf("not the same twice: %+v, %+v, %v", p, again, err)
		}
		for _, generation := range []int{1, 2, MaxGeneration} {
			checkPlace(t, p, name, generation)
		}
		id, attributes, err := parseContext(p.ID(name, 1).String(), p.Context())
		if err != nil || id != p.ID(name, 1) || !reflect.DeepEqual(attributes, p.Node) {
			t.Fatalf("the node reads %v, %+v, %v of %+v", id, attributes, err, p)
		}
	})
}

// checkPlace fails unless the volume has an id that parses and a prefix of one element below its base.
func checkPlace(t *testing.T, p Parameters, name string, generation int) {
	t.Helper()
	id := p.ID(name, generation)
	if parsed, err := ParseID(id.String()); err != nil || parsed != id {
		t.Fatalf("id %q: %v", id, err)
	}
	if p.BucketName == "" {
		if id.Prefix != "" || !strings.HasPrefix(id.Bucket, p.BucketNamePrefix) {
			t.Fatalf("a bucket of its own at %q", id)
		}
		return
	}
	element, below := strings.CutPrefix(id.Prefix, p.Prefix)
	if !below || strings.Count(element, "/") != 1 || len(element) < 2 || id.Prefix != p.VolumePrefix(name, generation) {
		t.Fatalf("volume at %q, base %q", id.Prefix, p.Prefix)
	}
	if strings.Contains(p.Prefix, "@") || strings.HasPrefix(id.Prefix, RecordPrefix) {
		t.Fatalf("prefix %q", id.Prefix)
	}
	if segment, g, ok := id.NameSegment(); !ok || segment != NameSegment(name) || g != generation {
		t.Fatalf("%q reads as %q, %d, %v", id, segment, g, ok)
	}
}
