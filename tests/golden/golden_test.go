// Package golden compares listings of what users and other versions of the driver see with files in testdata. CONTRIBUTING.md lists
// the listings that other tests keep.
package golden

import (
	"cmp"
	"encoding"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/inventory"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

var update = flag.Bool("update", false, "write the files of testdata instead of comparing them")

// compare fails the test if a file of testdata differs from the listing.
func compare(t *testing.T, name, listing string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(listing), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(golden) != listing {
		t.Errorf("%s differs; if users may see that, run go test ./golden -update. The new listing:\n%s", path, listing)
	}
}

// The help of each mode: its first lines, and its flags in their order. docs/reference/flags.md has their meanings and defaults.
func TestHelp_OfEachModeIsUnchanged(t *testing.T) {
	t.Parallel()
	bin := os.Getenv("S3CSI_BIN")
	if bin == "" {
		t.Skip("needs the built programs: set S3CSI_BIN to their directory")
	}
	flags := regexp.MustCompile(`(?m)^(?:  -\w, |      )--[a-z0-9-]+( [a-z-]+)?`)
	var b strings.Builder
	for _, mode := range []string{"", "controller", "node", "check", "status", "volumes"} {
		out, err := exec.CommandContext(t.Context(), filepath.Join(bin, "s3-csi-driver"), strings.Fields(mode+" --help")...).Output()
		if err != nil {
			t.Fatal(err)
		}
		head, _, _ := strings.Cut(string(out), "\n\n  ")
		fmt.Fprintf(&b, "# %s\n%s\n", cmp.Or(mode, "no mode"), head)
		for _, f := range flags.FindAllString(string(out), -1) {
			fmt.Fprintln(&b, strings.TrimSpace(f))
		}
	}
	compare(t, "help.txt", b.String())
}

// The fields of each JSON document and their types. Records of one minor version must be readable by the next and by the previous one.
func TestJSON_FieldsAreUnchanged(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	for _, document := range []struct {
		name  string
		value any
	}{
		{"record of a volume", records.Record{}},
		{"record of a snapshot", records.Snapshot{}},
		{"record of a mount", state.Mount{}},
		{"record of a publication", state.Publication{}},
		{"record of usage", state.Usage{}},
		{"record of a volume with a client in a pod", podvolume.Volume{}},
		{"status", status.Document{}},
		{"volumes", inventory.Document{}},
		{"check", check.Report{}},
	} {
		fmt.Fprintf(&b, "# %s\n", document.name)
		fields(&b, "", reflect.TypeOf(document.value))
	}
	compare(t, "json.txt", b.String())
}

// fields lists the fields of a struct in JSON.
func fields(b *strings.Builder, path string, typ reflect.Type) {
	for f := range typ.Fields() {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-", !f.IsExported() && !f.Anonymous:
			continue
		case f.Anonymous && name == "":
			fields(b, path, f.Type)
			continue
		}
		kind, nested := jsonType(f.Type)
		fmt.Fprintln(b, strings.TrimSpace(path+cmp.Or(name, f.Name)+" "+kind+" "+options))
		if nested != nil {
			fields(b, path+cmp.Or(name, f.Name)+".", nested)
		}
	}
}

// jsonType returns the name of a type in JSON, and the struct in it if it has one.
func jsonType(typ reflect.Type) (name string, nested reflect.Type) {
	if implements[json.Marshaler](typ) || implements[encoding.TextMarshaler](typ) {
		return "text", nil
	}
	switch typ.Kind() {
	case reflect.Pointer:
		return jsonType(typ.Elem())
	case reflect.Slice, reflect.Array:
		name, nested = jsonType(typ.Elem())
		return name + "[]", nested
	case reflect.Map:
		name, nested = jsonType(typ.Elem())
		return name + "{}", nested
	case reflect.Struct:
		return "object", typ
	case reflect.Bool, reflect.String:
		return typ.Kind().String(), nil
	default:
		return "number", nil
	}
}

func implements[T any](typ reflect.Type) bool {
	return typ.Implements(reflect.TypeFor[T]()) || reflect.PointerTo(typ).Implements(reflect.TypeFor[T]())
}
