//go:build linux

package main

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var (
	errHelp    = errors.New("help")
	errVersion = errors.New("version")
)

// argument is one option of the command line, as Mountpoint's own help describes it.
type argument struct {
	check     func(string) error // of its value; nil: a flag
	short     byte
	conflicts []string
	requires  string
	repeats   bool
	env       string // where a value comes from that is not on the command line
}

// table is Mountpoint's command line.
func table() map[string]argument {
	flag := argument{}
	text := argument{check: func(string) error { return nil }}
	path := argument{check: func(s string) error {
		if s == "" {
			return errors.New("a value is required")
		}
		return nil
	}}
	t := map[string]argument{
		"prefix": {check: checkPrefix}, "region": text, "endpoint-url": text, "force-path-style": flag, "transfer-acceleration": flag,
		"dual-stack": flag, "requester-pays": flag, "bucket-type": {check: oneOf("general-purpose", "directory")},
		"no-sign-request": flag, "profile": text, "read-only": flag, "storage-class": text, "allow-delete": flag, "allow-overwrite": flag,
		"incremental-upload": flag, "auto-unmount": flag, "allow-root": flag, "allow-other": {conflicts: []string{"allow-root"}},
		"maximum-throughput-gbps": {check: number(1, math.MaxUint64)}, "max-threads": {check: number(1, math.MaxUint64)},
		"memory-target": {check: number(512, math.MaxUint64)}, "part-size": {check: number(1, math.MaxUint64-1)},
		"read-part-size":  {check: number(1, math.MaxUint64-1), conflicts: []string{"part-size"}},
		"write-part-size": {check: number(1, math.MaxUint64-1), conflicts: []string{"part-size"}},
		"ca-bundle":       {check: path.check, env: "AWS_CA_BUNDLE"},
		"uid":             {check: number(1, math.MaxUint32)}, "gid": {check: number(1, math.MaxUint32)},
		"dir-mode": {check: checkMode}, "file-mode": {check: checkMode},
		"foreground": {short: 'f'}, "expected-bucket-owner": text, "log-directory": {check: path.check, short: 'l'},
		"log-metrics": flag, "otlp-endpoint": text, "otlp-export-interval": {check: number(1, math.MaxUint64), requires: "otlp-endpoint"},
		"debug": {short: 'd'}, "debug-crt": flag, "no-log": {conflicts: []string{"log-directory", "debug", "debug-crt", "log-metrics"}},
		"cache": path, "metadata-ttl": {check: checkTTL}, "negative-metadata-ttl": {check: checkTTL},
		"max-cache-size": {check: number(0, math.MaxUint64), requires: "cache"}, "cache-xz": {check: checkBucket},
		"user-agent-prefix": text, "sse": {check: oneOf("aws:kms", "aws:kms:dsse", "AES256")},
		"sse-kms-key-id": {check: checkKey, requires: "sse"}, "upload-checksums": {check: oneOf("crc32c", "crc64nvme", "off")},
		"infer-content-type": flag, "bind": {check: text.check, repeats: true},
	}
	return t
}

// arguments is a command line that was understood.
type arguments struct {
	given      map[string][]string // flags have one empty value
	bucket     string
	prefix     string
	mountPoint string
	uri        bool // the bucket was written as s3://, beside a prefix
}

func (a *arguments) has(name string) bool { return a.given[name] != nil }

func (a *arguments) value(name string) string {
	if v := a.given[name]; len(v) > 0 {
		return v[0]
	}
	return ""
}

func (a *arguments) number(name string, byDefault uint64) uint64 {
	if n, err := strconv.ParseUint(a.value(name), 10, 64); err == nil {
		return n
	}
	return byDefault
}

// parse reads a command line. Every error is one of usage.
func parse(argv []string) (*arguments, error) {
	known := table()
	a := &arguments{given: map[string][]string{}}
	var positional []string
	put := func(name, value string) error {
		option := known[name]
		if a.has(name) && !option.repeats {
			return fmt.Errorf("the argument '--%s' cannot be used multiple times", name)
		}
		if option.check != nil {
			if err := option.check(value); err != nil {
				return fmt.Errorf("invalid value '%s' for '--%s': %w", value, name, err)
			}
		}
		a.given[name] = append(a.given[name], value)
		return nil
	}
	next := func(i *int, name string) (string, error) {
		if *i+1 >= len(argv) || len(argv[*i+1]) > 1 && argv[*i+1][0] == '-' {
			return "", fmt.Errorf("a value is required for '--%s' but none was supplied", name)
		}
		*i++
		return argv[*i], nil
	}
	for i := 0; i < len(argv); i++ {
		arg := argv[i]
		switch {
		case arg == "--":
			positional = append(positional, argv[i+1:]...)
			i = len(argv)
		case strings.HasPrefix(arg, "--"):
			name, value, has := strings.Cut(arg[2:], "=")
			option, ok := known[name]
			switch {
			case name == "help" && !has:
				return nil, errHelp
			case name == "version" && !has:
				return nil, errVersion
			case !ok:
				return nil, fmt.Errorf("unexpected argument '--%s' found", name)
			case option.check == nil && has:
				return nil, fmt.Errorf("unexpected value '%s' for '--%s' found; no more were expected", value, name)
			case option.check != nil && !has:
				var err error
				if value, err = next(&i, name); err != nil {
					return nil, err
				}
			}
			if err := put(name, value); err != nil {
				return nil, err
			}
		case len(arg) > 1 && arg[0] == '-':
			if err := parseShort(arg, known, put, func(name string) (string, error) { return next(&i, name) }); err != nil {
				return nil, err
			}
		default:
			positional = append(positional, arg)
		}
	}
	return a, a.finish(known, positional)
}

// parseShort reads "-f", "-fd", "-l DIR" and "-lDIR".
func parseShort(arg string, known map[string]argument, put func(name, value string) error, next func(name string) (string, error)) error {
	for j := 1; j < len(arg); j++ {
		if arg[j] == 'h' {
			return errHelp
		}
		if arg[j] == 'V' {
			return errVersion
		}
		name := ""
		for n, option := range known {
			if option.short == arg[j] {
				name = n
			}
		}
		if name == "" {
			return fmt.Errorf("unexpected argument '-%c' found", arg[j])
		}
		if known[name].check == nil {
			if err := put(name, ""); err != nil {
				return err
			}
			continue
		}
		value := strings.TrimPrefix(arg[j+1:], "=")
		if value == "" {
			var err error
			if value, err = next(name); err != nil {
				return err
			}
		}
		return put(name, value)
	}
	return nil
}

// finish checks what options ask of each other and reads the two positional arguments.
func (a *arguments) finish(known map[string]argument, positional []string) error {
	if len(positional) < 2 {
		return errors.New("the following required arguments were not provided: <BUCKET_NAME> <DIRECTORY>")
	}
	if len(positional) > 2 {
		return fmt.Errorf("unexpected argument '%s' found", positional[2])
	}
	for _, name := range slices.Sorted(maps.Keys(a.given)) {
		for _, other := range known[name].conflicts {
			if a.has(other) {
				return fmt.Errorf("the argument '--%s' cannot be used with '--%s'", name, other)
			}
		}
		if r := known[name].requires; r != "" && !a.has(r) {
			return fmt.Errorf("the following required arguments were not provided: --%s", r)
		}
	}
	for name, option := range known {
		if v := os.Getenv(option.env); option.env != "" && v != "" && !a.has(name) {
			a.given[name] = []string{v}
		}
	}
	a.bucket, a.mountPoint, a.prefix = positional[0], positional[1], a.value("prefix")
	if err := checkBucket(a.bucket); err != nil {
		return fmt.Errorf("invalid value '%s' for '<BUCKET_NAME>': %w", a.bucket, err)
	}
	if rest, ok := strings.CutPrefix(a.bucket, "s3://"); ok {
		a.uri = a.prefix != ""
		a.bucket, a.prefix, _ = strings.Cut(rest, "/")
	}
	return nil
}

// checkTogether holds what the real program finds out after it has begun: its errors are no errors of usage.
func (a *arguments) checkTogether() error {
	var ignored []string
	for _, name := range []string{"read-only", "auto-unmount"} {
		if a.has(name) {
			ignored = append(ignored, "--"+name)
		}
	}
	if len(ignored) > 0 {
		return fmt.Errorf("Mount options: %s are ignored with FUSE fd mount point", strings.Join(ignored, ", ")) //nolint:staticcheck // the real one's form
	}
	if a.has("sse-kms-key-id") && a.value("sse") == "AES256" {
		return errors.New("--sse-kms-key-id can not be used with --sse AES256")
	}
	if a.has("memory-target") {
		memory := a.number("memory-target", 0) << 20
		if read := a.number("read-part-size", a.number("part-size", 8<<20)); read > memory-max(128<<20, memory/8) {
			return errors.New("read part size exceeds the memory available for data buffers")
		}
	}
	return nil
}

func usage() string {
	var b strings.Builder
	b.WriteString("Stand-in for Mountpoint for Amazon S3\n\nUsage: mount-s3 [OPTIONS] <BUCKET_NAME> <DIRECTORY>\n\nOptions:\n")
	known := table()
	for _, name := range slices.Sorted(maps.Keys(known)) {
		b.WriteString("      --" + name)
		if known[name].check != nil {
			b.WriteString(" <VALUE>")
		}
		b.WriteString("\n")
	}
	return strings.TrimSuffix(b.String(), "\n")
}

var bucketName = regexp.MustCompile(`^[0-9a-zA-Z._-]+$`)

func checkBucket(s string) error {
	name, uri := strings.CutPrefix(s, "s3://")
	if uri {
		var prefix string
		name, prefix, _ = strings.Cut(name, "/")
		if err := checkPrefix(prefix); err != nil {
			return fmt.Errorf("invalid bucket prefix: %w", err)
		}
	}
	if len(name) < 3 || len(name) > 255 {
		return errors.New("bucket names must be 3-255 characters long")
	}
	if !bucketName.MatchString(name) && (uri || !strings.HasPrefix(name, "arn:")) {
		return errors.New("the bucket must have a valid name (only letters, numbers, . and -) or a valid ARN")
	}
	return nil
}

func checkPrefix(s string) error {
	if s != "" && !strings.HasSuffix(s, "/") {
		return errors.New("prefix must end in '/'")
	}
	return nil
}

func checkMode(s string) error {
	n, err := strconv.ParseUint(s, 8, 16)
	switch {
	case err != nil:
		return errors.New("must be a valid octal number")
	case n > 0o777:
		return errors.New("only user/group/other permissions are supported")
	}
	return nil
}

func checkTTL(s string) error {
	if s == "minimal" || s == "indefinite" {
		return nil
	}
	if n, err := strconv.ParseUint(s, 10, 64); err != nil || n > 100*365*24*60*60 {
		return errors.New("TTL must be a valid number of seconds, or 'indefinite', or 'minimal'")
	}
	return nil
}

func checkKey(s string) error {
	if !strings.HasPrefix(s, "arn:") || !strings.Contains(s, ":key") {
		return errors.New("KMS Key ARN is only accepted as a key identifier, Key Alias ARN is not accepted")
	}
	return nil
}

func oneOf(words ...string) func(string) error {
	return func(s string) error {
		if !slices.Contains(words, s) {
			return fmt.Errorf("[possible values: %s]", strings.Join(words, ", "))
		}
		return nil
	}
}

func number(least, most uint64) func(string) error {
	return func(s string) error {
		if n, err := strconv.ParseUint(s, 10, 64); err != nil || n < least || n > most {
			return fmt.Errorf("%s is not in %d..%d", s, least, most)
		}
		return nil
	}
}
