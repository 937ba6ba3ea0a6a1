package state

import (
	"reflect"
	"strings"
	"testing"
)

// fill sets every field of a value, so that nothing that can be shared is nil.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Struct:
		for _, field := range v.Fields() {
			if field.CanSet() {
				fill(field)
			}
		}
	case reflect.String:
		v.SetString("text")
	case reflect.Map, reflect.Interface, reflect.Chan, reflect.Func:
		panic("extend clone and this test for a " + v.Kind().String())
	default:
	}
}

// shared returns the paths of pointers and slices that are the same in two values.
func shared(path string, a, b reflect.Value) (same []string) {
	switch a.Kind() {
	case reflect.Pointer, reflect.Slice:
		if a.Type().String() == "*time.Location" {
			return nil // never modified
		}
		if a.Pointer() == b.Pointer() {
			return []string{path}
		}
		if a.Kind() == reflect.Pointer {
			return shared(path, a.Elem(), b.Elem())
		}
		for i := range a.Len() {
			same = append(same, shared(path, a.Index(i), b.Index(i))...)
		}
	case reflect.Struct:
		for i := range a.NumField() {
			same = append(same, shared(path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))...)
		}
	default:
	}
	return same
}

func TestClone_SharesNothing(t *testing.T) {
	var m Mount
	fill(reflect.ValueOf(&m).Elem())
	var p Publication
	fill(reflect.ValueOf(&p).Elem())
	for _, c := range []struct{ a, b any }{{m, m.clone()}, {p, p.clone()}} {
		if !reflect.DeepEqual(c.a, c.b) {
			t.Errorf("%+v is not %+v", c.b, c.a)
		}
		if same := shared("", reflect.ValueOf(c.a), reflect.ValueOf(c.b)); len(same) > 0 {
			t.Errorf("a clone of %T shares %q", c.a, same)
		}
	}
}

func TestRecordCache_UnchangedRecordIsReadOnce(t *testing.T) {
	f := testStore(t)
	c := newRecordCache(Mount.clone)
	const file = "record"
	read := func() (Mount, bool) {
		t.Helper()
		m, ok, err := c.read(f, file)
		if err != nil {
			t.Fatal(err)
		}
		return m, ok
	}
	if _, ok := read(); ok {
		t.Error("there is no record yet")
	}
	for round, want := range []string{"one", "two", "six"} { // of one length, within one tick of the clock
		if err := f.writeRecord(file, Mount{Name: want, Predecessors: []string{"a"}}); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			m, ok := read()
			if !ok || m.Name != want || m.Predecessors[0] != "a" {
				t.Fatalf("%+v, want %s", m, want)
			}
			m.Predecessors[0] = "modified"
		}
		if reads := int(f.reads.Load()); reads != round+1 {
			t.Errorf("%d reads of %d versions", reads, round+1)
		}
	}
	if err := f.root.WriteFile(file, []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.read(f, file); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a damaged record: %v", err)
	}
	if err := f.root.Remove(file); err != nil {
		t.Fatal(err)
	}
	if _, ok := read(); ok || len(c.known) > 0 {
		t.Errorf("a removed record is known: %v", c.known)
	}
}

// A record that is written while it is read is not kept: a file system may give the next version the inode of the one before.
func TestRecordCache_RecordWrittenMeanwhileIsNotKept(t *testing.T) {
	f := testStore(t)
	const file = "record"
	var c *recordCache[Mount]
	written := false
	c = newRecordCache(func(m Mount) Mount { // between reading and keeping
		if written {
			c.forget(file)
			written = false
		}
		return m.clone()
	})
	if err := f.writeRecord(file, Mount{Name: "one"}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{0, 1} {
		written = want == 0
		if m, ok, err := c.read(f, file); err != nil || !ok || m.Name != "one" || len(c.known) != want {
			t.Errorf("%+v, %t, %v, and %d are known, want %d", m, ok, err, len(c.known), want)
		}
	}
}
