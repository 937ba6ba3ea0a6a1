package client

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Declaration is a client in the operator's config file. Volumes and pods cannot declare clients.
type Declaration struct {
	Program string `json:"program"` // file name in --client-dir
	SHA256  string `json:"sha256"`  // of the program, in hexadecimal; "": any
	Fuse    string `json:"fuse"`    // how it gets the FUSE descriptor, one of Fuse…
	// Credentials is how it gets keys, one of Credentials…; "" is CredentialsEndpoint.
	Credentials string `json:"credentials"`
	// Args are its arguments, and Operands those after the volume's options. Both may have placeholders. An argument that ends with
	// one that is empty for a mount ("--region=${region}") is left out.
	Args     []string         `json:"args"`
	ArgsIf   *ConditionalArgs `json:"argsIf"` // between Args and the volume's options
	Operands []string         `json:"operands"`
	// Environment has further variables. A value is a text without placeholders, or ${caFile}: then a mount without one has no such variable.
	Environment map[string]string            `json:"environment"`
	Options     map[string]OptionDeclaration `json:"-"` // by name; the config file has them under the key "options"
	Needs       []string                     `json:"needs"`
	Memory      string                       `json:"memory"` // the lowest memory limit of client and helper together
	Tasks       int64                        `json:"tasks"`  // the lowest limit of their processes and threads
	Drain       string                       `json:"drain"`  // one of Drain…
	Cache       string                       `json:"cache"`  // one of Cache…
	Inline      bool                         `json:"inline"` // inline volumes may use it
}

// ConditionalArgs are arguments for mounts with a property.
type ConditionalArgs struct {
	ReadOnly  []string `json:"readOnly"`  // the mount is read-only
	Endpoint  []string `json:"endpoint"`  // the backend has an endpoint
	CAFile    []string `json:"caFile"`    // the backend has certificates of its own
	PathStyle []string `json:"pathStyle"` // the bucket is in the path of URLs, not in the host's name
	Cache     []string `json:"cache"`     // the volume has the parameter cache
	Relaxed   []string `json:"relaxed"`   // the volume has the parameter consistency: relaxed
}

// OptionDeclaration is a mount option of a declared client.
type OptionDeclaration struct {
	Type     string   `json:"type"` // flag, integer, duration, size, enum or text
	Min      string   `json:"min"`  // integer, duration ("1s") or size ("1Mi")
	Max      string   `json:"max"`
	Values   []string `json:"values"`  // enum
	Pattern  string   `json:"pattern"` // text: a regular expression that matches the whole value
	Default  string   `json:"default"` // for people
	Meaning  string   `json:"meaning"` // for people
	Argument string   `json:"argument"`
}

// Values of Declaration.Fuse.
const (
	FusePath     = "path"     // the mount point is the descriptor, /dev/fd/N: the placeholder ${mountpoint}
	FuseArgument = "argument" // the number of the descriptor is an argument: the placeholder ${fd}
	// FuseFusermount is for clients that execute fusermount3 or fusermount. ${mountpoint} is a directory of their own.
	FuseFusermount = "fusermount"
)

// Values of Declaration.Credentials.
const (
	CredentialsEndpoint = "endpoint" // from the helper's endpoint, as the AWS SDKs do, before the former ones expire
	// CredentialsStatic is for clients that read keys once, when they start: from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
	CredentialsStatic = "static"
)

// Values of Declaration.Drain: when a client ends after its unmount.
const (
	DrainExits   = "exits"   // it ends with 0 when all is stored
	DrainUnknown = "unknown" // it may end earlier
)

// Values of Declaration.Cache: what is in a client's cache directory.
const (
	CacheNone   = "none"
	CacheCopies = "copies" // of what is stored
	CacheUnsent = "unsent" // closed files that are not stored yet, too
)

const (
	declaredMemory = 64 << 20 // bytes; the default
	declaredTasks  = 64
	maxArgs        = 100
	maxArg         = 1024 // bytes
)

const (
	programName  volume.Pattern = `^[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}$`
	digest       volume.Pattern = `^[0-9a-f]{64}$`
	variableName volume.Pattern = `^[A-Z_][A-Z0-9_]{0,63}$`
	printable    volume.Pattern = `^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$`
)

// placeholders are the placeholders of a declaration, and their values for a mount. None has a secret.
func placeholders(in Invocation) map[string]string {
	return map[string]string{
		"bucket": in.Bucket, "prefix": in.Prefix, "region": in.Region, "endpoint": in.Endpoint, "caFile": in.CAFile,
		"uid": decimalOf(uint64(in.UID)), "gid": decimalOf(uint64(in.GID)), "dirMode": mode(in.DirMode), "fileMode": mode(in.FileMode),
		"stateDir": in.StateDir, "cacheDir": in.CacheDir, "cacheMiB": decimalOf(in.cacheSize() / uint64(mib)), "memoryMiB": memoryMiB(in.MemoryLimit),
		"mountpoint": fmt.Sprintf("/dev/fd/%d", FuseFD), "fd": strconv.Itoa(FuseFD), "userAgent": in.UserAgent,
	}
}

func memoryMiB(limit uint64) string {
	if limit == 0 {
		return ""
	}
	return decimalOf(limit / uint64(mib))
}

// reserved returns why no client can have options of some names, declared or not: what they set belongs to the driver, to the operator or
// to the volume's parameters.
func reserved() map[string]string {
	refused := map[string]string{
		"prefix": "use the volume parameter prefix",
		"bucket": "use the volume parameter bucketName",
		"region": "the driver detects the bucket's region; to override it, set the attribute region of a static volume, or the region of the backend in the " +
			"driver's config file",
	}
	refuse(refused, "use the volume parameter uid, gid, dirMode or fileMode", "uid", "gid", "dir-mode", "file-mode", "umask", "dir-perms", "file-perms")
	refuse(refused, "list each option separately, by its own name", "o", "option", "options")
	refuse(refused, "set the endpoint, addressing style and CA of the backend in the driver's config file", "endpoint", "endpoint-url", "url", "ca-bundle",
		"ca-file", "path-style", "force-path-style", "use-path-request-style", "no-check-certificate")
	refuse(refused, "set proxy of the backend", "proxy", "http-proxy", "https-proxy")
	refuse(refused, "use the volume parameter credentials", "credentials", "profile", "access-key-id", "secret-access-key", "passwd-file", "no-sign-request",
		"iam", "env-auth", "config")
	refuse(refused, "the driver sets it for every mount", "allow-other", "allow-root", "auto-unmount", "foreground", "daemon", "f", "fuse-fd", "user-agent")
	refuse(refused, "clients write no log files; the helper logs their output", "log-file", "logfile", "log-directory", "log-dir")
	refuse(refused, "use the volume parameters cache and cacheSize; the driver chooses the cache directory", "cache", "cache-dir", "use-cache", "temp-dir",
		"tmpdir")
	refuse(refused, "use readOnly of the volume or of the pod's volume mount", "read-only", "ro")
	return refused
}

func refuse(refused map[string]string, reason string, names ...string) {
	for _, n := range names {
		refused[n] = reason
	}
}

// Client returns the declared client. name is its name, and place that of the declaration in the config file, for errors, which are
// Invalid.
func (d Declaration) Client(name, place string) (Client, error) {
	at := func(key string) string { return place + "." + key }
	used, problem := d.checkArguments(at)
	err := cmp.Or(
		check(!slices.ContainsFunc(All(), func(c Client) bool { return c.Name == name }), place, "the driver has a client of this name; choose another one"),
		check(programName.MatchString(d.Program), at("program"), "must be the file name of a program in --client-dir, without its directory"),
		check(d.SHA256 == "" || digest.MatchString(d.SHA256), at("sha256"), "must be 64 hexadecimal digits in lower case"),
		problem,
		d.checkEnvironment(at),
		checkOneOf(at("fuse"), d.Fuse, FusePath, FuseArgument, FuseFusermount),
		checkOneOf(at("credentials"), cmp.Or(d.Credentials, CredentialsEndpoint), CredentialsEndpoint, CredentialsStatic),
		checkOneOf(at("drain"), d.Drain, DrainExits, DrainUnknown),
		checkOneOf(at("cache"), d.Cache, CacheNone, CacheCopies, CacheUnsent),
		check(d.Credentials != CredentialsStatic || d.Cache != CacheUnsent, at("cache"),
			"must be none or copies with credentials: static: a client with unsent files cannot be replaced when its keys change"),
		check(d.Tasks == 0 || d.Tasks >= 32 && d.Tasks <= 1<<20, at("tasks"), "must be a number from 32 to 1048576"),
	)
	c := Client{
		Name: name, Programs: []string{d.Program}, SHA256: d.SHA256, Declared: true, Options: map[string]OptionType{}, Refused: reserved(),
		MinMemory: declaredMemory, MinTasks: cmp.Or(uint64(d.Tasks), declaredTasks), NoInline: !d.Inline, Fusermount: d.Fuse == FuseFusermount,
		ignores: d.ignores(used), ExitsEarly: d.Drain == DrainUnknown, WriteBack: d.Cache == CacheUnsent, StaticKeys: d.Credentials == CredentialsStatic,
	}
	if d.Memory != "" {
		bytes, wrong := volume.ParseQuantity(d.Memory)
		err = cmp.Or(err, check(wrong == nil && bytes >= uint64(16*mib), at("memory"), "must be a size of at least 16Mi, such as 128Mi"))
		c.MinMemory = bytes
	}
	for i, need := range d.Needs {
		err = cmp.Or(err, check(need == "delete", at(fmt.Sprintf("needs[%d]", i)), "must be delete; a session can list, read and write in any case"))
	}
	if err != nil {
		return Client{}, err
	}
	c.access = func([]volume.Option) policy.Needs { return policy.Needs{Delete: len(d.Needs) > 0} }
	arguments := map[string]string{}
	for _, option := range slices.Sorted(maps.Keys(d.Options)) {
		o := d.Options[option]
		if !volume.IsName(option, 64) {
			return Client{}, fault.Field(at("options."+clip(option)), "is not an option's name: at most 64 of a-z, 0-9 and -, not - at the start or end, "+
				"without the dashes before it")
		}
		if reason, ok := c.Refused[option]; ok {
			return Client{}, fault.Field(at("options."+option), "cannot be declared: %s", reason)
		}
		if c.Options[option], arguments[option], err = o.option(option, at("options."+option)); err != nil {
			return Client{}, err
		}
	}
	c.Command = func(in Invocation) Command { return d.command(arguments, in) }
	return c, nil
}

// check returns an error at a place unless ok.
func check(ok bool, place, problem string) error {
	if ok {
		return nil
	}
	return fault.Field(place, "%s", problem)
}

func checkOneOf(place, value string, known ...string) error {
	return check(slices.Contains(known, value), place, "must be one of "+strings.Join(known, ", "))
}

// lists are the lists of arguments by their keys.
func (d Declaration) lists() map[string][]string {
	lists := map[string][]string{"args": d.Args, "operands": d.Operands}
	if d.ArgsIf != nil {
		lists["argsIf.readOnly"], lists["argsIf.pathStyle"] = d.ArgsIf.ReadOnly, d.ArgsIf.PathStyle
		lists["argsIf.endpoint"], lists["argsIf.caFile"] = d.ArgsIf.Endpoint, d.ArgsIf.CAFile
		lists["argsIf.cache"], lists["argsIf.relaxed"] = d.ArgsIf.Cache, d.ArgsIf.Relaxed
	}
	return lists
}

// checkArguments returns the placeholders that the arguments use.
func (d Declaration) checkArguments(at func(string) string) (used map[string]bool, err error) {
	used = map[string]bool{}
	lists := d.lists()
	for _, key := range slices.Sorted(maps.Keys(lists)) {
		if len(lists[key]) > maxArgs {
			return nil, fault.Field(at(key), "has more than %d arguments", maxArgs)
		}
		for i, arg := range lists[key] {
			here := at(fmt.Sprintf("%s[%d]", key, i))
			names, err := namesIn(arg)
			if err != nil {
				return nil, fault.Field(here, "%w", err)
			}
			for _, name := range names {
				used[name] = true
			}
			if startsWithPrefix(arg) {
				return nil, fault.Field(here, "must not begin with ${prefix}, which could be taken for an option; write --name=${prefix}, or begin with ${bucket}")
			}
			if len(names) == 1 && arg == "${"+names[0]+"}" && slices.Contains(optional(), names[0]) && key != "argsIf."+names[0] {
				return nil, fault.Field(here, "is empty for some mounts; write --name=${%s}, which is then left out", names[0])
			}
		}
	}
	if want := map[string]string{FusePath: "mountpoint", FuseArgument: "fd", FuseFusermount: "mountpoint"}[d.Fuse]; want != "" && !used[want] {
		return nil, fault.Field(at("args"), "the placeholder ${%s} is missing, without which the client gets no FUSE descriptor; add it to args or operands", want)
	}
	if d.Cache == CacheNone && used["cacheDir"] {
		return nil, fault.Field(at("cache"), "must be copies or unsent, because an argument has ${cacheDir}")
	}
	return used, nil
}

// ignores returns the attributes for which there is no argument.
func (d Declaration) ignores(used map[string]bool) (attributes []string) {
	for placeholder, attribute := range map[string]string{"prefix": "prefix", "uid": "uid", "gid": "gid", "dirMode": "dirMode", "fileMode": "fileMode",
		"cacheMiB": "cacheSize"} {
		if !used[placeholder] {
			attributes = append(attributes, attribute)
		}
	}
	if !used["cacheDir"] && (d.ArgsIf == nil || len(d.ArgsIf.Cache) == 0) {
		attributes = append(attributes, "cache")
	}
	slices.Sort(attributes)
	return attributes
}

// startsWithPrefix reports whether an argument can begin with a volume's prefix: no other value of a placeholder begins with a dash.
func startsWithPrefix(arg string) bool {
	for rest := ""; rest != arg; {
		rest = arg
		for _, name := range optional() {
			arg = strings.TrimPrefix(arg, "${"+name+"}")
		}
	}
	return strings.HasPrefix(arg, "${prefix}")
}

// optional are the placeholders without a value for some mounts.
func optional() []string { return []string{"caFile", "endpoint", "memoryMiB", "region", "userAgent"} }

// namesIn returns the names of the placeholders in an argument.
func namesIn(arg string) ([]string, error) {
	if len(arg) > maxArg || !printable.MatchString(arg) {
		return nil, fmt.Errorf("must be at most %d printable ASCII characters, without white space at the ends", maxArg)
	}
	known := placeholders(Invocation{})
	var names []string
	for rest := arg; ; {
		_, after, ok := strings.Cut(rest, "${")
		if !ok {
			return names, nil
		}
		name, tail, closed := strings.Cut(after, "}")
		if _, ok := known[name]; !ok || !closed {
			return nil, fmt.Errorf("has an unknown placeholder ${%s; known: ${%s}", clip(after), strings.Join(slices.Sorted(maps.Keys(known)), "}, ${"))
		}
		names, rest = append(names, name), tail
	}
}

func (d Declaration) checkEnvironment(at func(string) string) error {
	for _, name := range slices.Sorted(maps.Keys(d.Environment)) {
		here := at("environment." + clip(name))
		_, ours := slices.BinarySearch(names(environment(Invocation{})), name)
		switch value := d.Environment[name]; {
		case !variableName.MatchString(name):
			return fault.Field(here, "is not a variable's name: at most 64 of A-Z, 0-9 and _, no digit at the start")
		case ours, strings.HasPrefix(name, "LD_"), strings.HasPrefix(name, "AWS_") && !slices.Contains(harmless(), name):
			return fault.Field(here, "cannot be declared: the driver sets the client's environment and credentials")
		case strings.HasSuffix(name, "_PROXY"):
			return fault.Field(here, "cannot be declared; set proxy of the backend")
		case value == caFileVariable:
		case len(value) > maxArg || value != "" && !printable.MatchString(value) || strings.Contains(value, "${"):
			return fault.Field(here, "must be at most %d printable ASCII characters without placeholders, or %s", maxArg, caFileVariable)
		}
	}
	return nil
}

// caFileVariable is the only value of a variable with a placeholder. Programs with libcurl take certificates from CURL_CA_BUNDLE.
const caFileVariable = "${caFile}"

// harmless are the variables of AWS SDKs that neither lead to credentials nor to another service (AWS SDKs and Tools Reference Guide,
// "Environment variables support").
func harmless() []string {
	return []string{"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE", "AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"}
}

// names returns the sorted names of variables.
func names(env []string) []string {
	list := make([]string, 0, len(env))
	for _, e := range env {
		name, _, _ := strings.Cut(e, "=")
		list = append(list, name)
	}
	slices.Sort(list)
	return list
}

// option returns an option's type and its argument, in which ${value} stands for its value.
func (o OptionDeclaration) option(name, place string) (t OptionType, argument string, err error) {
	t = OptionType{Default: o.Default, Meaning: o.Meaning}
	kinds := map[string]Kind{"flag": Flag, "integer": Integer, "duration": Duration, "size": Size, "enum": Enum, "text": Text}
	kind, ok := kinds[o.Type]
	if !ok {
		return t, "", fault.Field(place+".type", "must be one of %s", strings.Join(slices.Sorted(maps.Keys(kinds)), ", "))
	}
	t.Kind = kind
	bounded := kind == Integer || kind == Duration || kind == Size
	const sized = "integer, duration and size"
	for _, extra := range []struct {
		key, types  string
		given, fits bool
	}{
		{"min", sized, o.Min != "", bounded}, {"max", sized, o.Max != "", bounded},
		{"values", "enum", len(o.Values) > 0, kind == Enum}, {"pattern", "text", o.Pattern != "", kind == Text},
	} {
		if extra.given != extra.fits {
			return t, "", fault.Field(place+"."+extra.key, "must be given for %s, and for no other type", extra.types)
		}
	}
	switch {
	case bounded:
		if t.Min, err = bound(kind, o.Min); err != nil {
			return t, "", fault.Field(place+".min", "%w", err)
		}
		if t.Max, err = bound(kind, o.Max); err != nil {
			return t, "", fault.Field(place+".max", "%w", err)
		}
		if t.Max < t.Min {
			return t, "", fault.Field(place+".max", "is less than min")
		}
	case kind == Enum:
		for i, v := range o.Values {
			if !enumValue.MatchString(v) {
				return t, "", fault.Field(fmt.Sprintf("%s.values[%d]", place, i), "must be letters, digits and _ . : -, and not begin with a dash")
			}
		}
		t.Words = o.Values
	case kind == Text:
		t.Pattern, t.Form = volume.Pattern("^(?:"+o.Pattern+")$"), "a text that matches "+o.Pattern
		if _, err := regexp.Compile(string(t.Pattern)); err != nil || len(o.Pattern) > maxArg { // as it is used: it could end in a quote (\Q)
			return t, "", fault.Field(place+".pattern", "is not a regular expression (RE2)")
		}
	}
	argument = o.Argument
	switch {
	case argument == "" && kind == Flag:
		argument = "--" + name
	case argument == "":
		argument = "--" + name + "=${value}"
	case len(argument) > maxArg || !printable.MatchString(argument) || strings.Count(argument, "${") != strings.Count(argument, "${value}"):
		return t, "", fault.Field(place+".argument", "must be printable ASCII characters, with no placeholder but ${value}")
	case strings.Contains(argument, "${value}") == (kind == Flag):
		return t, "", fault.Field(place+".argument", "must have the placeholder ${value} for every type but flag")
	case !strings.HasPrefix(argument, "-"):
		return t, "", fault.Field(place+".argument", "must begin with a dash")
	}
	return t, argument, nil
}

const enumValue volume.Pattern = `^[A-Za-z0-9_.:][A-Za-z0-9_.:-]{0,63}$`

// bound reads a limit of an option's values.
func bound(kind Kind, text string) (int64, error) {
	t := OptionType{Kind: kind, Max: 1 << 42}
	if !t.takes(text) {
		return 0, fmt.Errorf("must be %s", map[Kind]string{Integer: "a number in quotes", Duration: "a duration such as 90s", Size: "a size such as 512Mi"}[kind])
	}
	switch kind {
	case Integer:
		return strconv.ParseInt(text, 10, 64)
	case Duration:
		d, err := time.ParseDuration(text)
		return d.Milliseconds(), err
	default:
		n, _ := parseSize(text)
		return n, nil
	}
}

// command builds the process from an invocation that was checked before.
func (d Declaration) command(arguments map[string]string, in Invocation) Command {
	values := placeholders(in)
	if d.Fuse == FuseFusermount {
		values["mountpoint"] = filepath.Join(in.StateDir, Mountpoint)
	}
	argv := append([]string{in.Binary}, fill(d.Args, values)...)
	if d.ArgsIf != nil {
		for _, list := range []struct {
			when bool
			args []string
		}{
			{in.ReadOnly, d.ArgsIf.ReadOnly}, {in.Endpoint != "", d.ArgsIf.Endpoint}, {in.CAFile != "", d.ArgsIf.CAFile}, {in.PathStyle, d.ArgsIf.PathStyle},
			{in.Cache, d.ArgsIf.Cache},
			{in.Consistency == volume.ConsistencyRelaxed, d.ArgsIf.Relaxed},
		} {
			if list.when {
				argv = append(argv, fill(list.args, values)...)
			}
		}
	}
	for _, o := range in.Options {
		if d.Options[o.Name].Type != "flag" {
			argv = append(argv, strings.ReplaceAll(arguments[o.Name], "${value}", o.Value))
		} else if o.On() {
			argv = append(argv, arguments[o.Name])
		}
	}
	argv = append(argv, fill(d.Operands, values)...)
	env := environment(in)
	for _, name := range slices.Sorted(maps.Keys(d.Environment)) {
		value := d.Environment[name]
		if value == caFileVariable {
			value = in.CAFile
		}
		if value != "" || d.Environment[name] == "" {
			env = append(env, name+"="+value)
		}
	}
	c := in.command(argv, env)
	c.StaticKeys = d.Credentials == CredentialsStatic
	if d.Fuse == FuseFusermount {
		c.Fusermount = filepath.Join(filepath.Dir(in.Binary), FusermountProgram)
	}
	return c
}

// FusermountProgram is the file name of the program that takes the place of fusermount3 and fusermount. It is beside the clients' programs.
const FusermountProgram = "s3-csi-fusermount"

// fill replaces the placeholders in arguments, and leaves arguments of the form "--name=${placeholder}" out if it is empty.
func fill(args []string, values map[string]string) []string {
	pairs := make([]string, 0, 2*len(values))
	for name, value := range values {
		pairs = append(pairs, "${"+name+"}", value)
	}
	replace := strings.NewReplacer(pairs...)
	filled := make([]string, 0, len(args))
	for _, arg := range args {
		if i := strings.LastIndex(arg, "${"); strings.HasSuffix(arg, "}") && i > 0 && arg[i-1] == '=' && values[arg[i+2:len(arg)-1]] == "" {
			continue
		}
		filled = append(filled, replace.Replace(arg))
	}
	return filled
}

func clip(s string) string {
	if len(s) > 64 {
		return s[:64]
	}
	return s
}
