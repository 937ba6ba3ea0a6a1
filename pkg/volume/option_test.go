package volume

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"unicode"
)

func TestParseMountOptionsReadsEachSpelling(t *testing.T) {
	for flag, want := range map[string]Option{
		"allow-delete":   {Name: "allow-delete"},
		"--allow-delete": {Name: "allow-delete"},
		"uid=1000":       {"uid", "1000", true},
		"--uid=1000":     {"uid", "1000", true},
		"--uid 1000":     {"uid", "1000", true},
		"name=":          {"name", "", true},
		"a=b=c":          {"a", "b=c", true},
		"--a b=c":        {"a", "b=c", true},
		"a=-1":           {"a", "-1", true},
		"a=x,y":          {"a", "x,y", true},
		"a=größe":        {"a", "größe", true},
		`a="b"`:          {"a", "b", true},
		`--a 'b'`:        {"a", "b", true},
		`a=""`:           {"a", "", true},
		`a=b"c`:          {"a", `b"c`, true},
		"vfs-cache":      {Name: "vfs-cache"},
	} {
		got, err := ParseMountOptions([]string{flag}, "f")
		if err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("%q reads as %+v, %v", flag, got, err)
		}
	}
	if got, err := ParseMountOptions(nil, "f"); got != nil || err != nil {
		t.Errorf("no options read as %v, %v", got, err)
	}
}

func TestParseMountOptionsRefusesWhatCouldHoldAnotherOption(t *testing.T) {
	for name, flag := range map[string]string{
		"empty":                          "",
		"only dashes":                    "--",
		"single dash":                    "-o",
		"single dash with value":         "-o allow_other",
		"short option with its value":    "-oallow_other",
		"single dash long name":          "-uid=1000",
		"three dashes":                   "---uid",
		"two options":                    "--allow-delete --allow-other",
		"two options by equals":          "--cache=/x --allow-other",
		"value that is an option":        "--cache -o",
		"two spaces":                     "--uid  1000",
		"space and value without dashes": "uid 1000",
		"leading space":                  " --uid=1000",
		"trailing space":                 "--uid=1000 ",
		"ends in a space":                "--uid ",
		"tab":                            "--uid\t1000",
		"space before equals":            "--uid =1000",
		"space after equals":             "--uid= 1000",
		"no-break space":                 "--uid\u00a01000",
		"zero width space":               "--uid=\u200b1000",
		"newline":                        "allow-delete\n--allow-other",
		"carriage return":                "allow-delete\r",
		"NUL":                            "allow-delete\x00",
		"escape":                         "a=\x1b[2J",
		"line separator":                 "a=b\u2028c",
		"not UTF-8":                      "a=\xff",
		"capitals":                       "Allow-Delete",
		"underscore":                     "allow_other",
		"digit first":                    "1a",
		"no name":                        "=1000",
		"no name after dashes":           "--=1000",
		"slash":                          "/etc/passwd",
		"comma in name":                  "rw,allow-other",
		"quote before the value":         `a="b`,
		"quote after the value":          `a=b"`,
		"two quoted values":              `a="b""c"`,
		"quotes in quotes":               `a='"b"'`,
		"quoted space":                   `--a "b c"`,
		"quoted option":                  `"allow-delete"`,
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseMountOptions([]string{"read-only", flag}, "volume_capability.mount.mount_flags")
			if err == nil {
				t.Fatalf("%q reads as %+v", flag, got)
			}
			wantInvalid(t, err, "volume_capability.mount.mount_flags[1]")
		})
	}
}

func TestParseMountOptionsRefusesANameTwice(t *testing.T) {
	for _, flags := range [][]string{{"uid=1", "uid=1"}, {"uid=1", "--uid 2"}, {"--a", "b", "a=1"}} {
		_, err := ParseMountOptions(flags, "f")
		wantInvalid(t, err, fmt.Sprintf("f[%d]", len(flags)-1), "repeats")
	}
}

func TestParseMountOptionsIsBounded(t *testing.T) {
	_, err := ParseMountOptions([]string{"a=" + strings.Repeat("x", 2100), "b=" + strings.Repeat("x", 2100)}, "f")
	wantInvalid(t, err, "f", "4096")
}

func FuzzParseMountOptions(f *testing.F) {
	for _, s := range []string{"allow-delete", "--uid 1000", "-o x", "-ox", "a=b", "a\nb", "--a --b", "a=", "=", "--a  b"} {
		f.Add(s, "b=1")
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		options, err := ParseMountOptions([]string{a, b}, "f")
		if err != nil {
			wantInvalid(t, err, "", "f[")
			return
		}
		if len(options) != 2 || options[0].Name == options[1].Name {
			t.Fatalf("%q, %q read as %+v", a, b, options)
		}
		for _, o := range options {
			if checkOptionName(o.Name) != nil || strings.ContainsFunc(o.Value, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }) {
				t.Fatalf("%q, %q read as %+v", a, b, options)
			}
			again, err := ParseMountOptions([]string{o.String()}, "f")
			if err != nil || !reflect.DeepEqual(again, []Option{o}) {
				t.Fatalf("%+v is written %q and reads as %+v, %v", o, o.String(), again, err)
			}
		}
	})
}

func TestErrorsAboutMountOptionsDoNotShowValues(t *testing.T) {
	for _, flag := range []string{
		"-o password=hidden", "-opassword=hidden", "--password hidden again", "password hidden", "Password=hidden", "  password=hidden",
		"password=\thidden", "--password =hidden", "--password -hidden", "password\x00hidden", "=hidden",
	} {
		_, err := ParseMountOptions([]string{flag}, "mountOptions")
		if err == nil {
			t.Errorf("%q is accepted", flag)
		} else if strings.Contains(err.Error(), "hidden") {
			t.Errorf("%q: the value is shown: %v", flag, err)
		}
	}
}
