package backend

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// decodeKeys fills the struct that out points to from a JSON object, key by key. Unlike encoding/json it is case-sensitive, and
// all its errors name the place.
func decodeKeys(place string, raw json.RawMessage, out any) error {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(raw, &keys); err != nil || keys == nil {
		if place == "" {
			return fault.Errorf(fault.Invalid, "the config file must be a map with the keys backends and clients")
		}
		return fault.Field(place, "must be a map of settings; use {} for an empty one")
	}
	fields := fieldsByKey(out)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		at := key
		if place != "" {
			at = place + "." + Clip(key, 64)
		}
		field, ok := fields[key]
		if !ok {
			return fault.Field(Clip(at, 200), "unknown key; known here: %s", strings.Join(slices.Sorted(maps.Keys(fields)), ", "))
		}
		switch value := string(keys[key]); {
		// An empty value is probably a template that was not filled in.
		case value == "null":
			if field.Kind() == reflect.Map {
				continue
			}
			return fault.Field(at, "has no value; omit the key for its default")
		case value == `""`:
			return fault.Field(at, "is empty; omit the key for its default")
		case field.Kind() == reflect.Slice:
			if err := decodeList(at, keys[key], field); err != nil {
				return err
			}
		case field.Kind() == reflect.Pointer:
			field.Set(reflect.New(field.Type().Elem()))
			if err := decodeKeys(at, keys[key], field.Interface()); err != nil {
				return err
			}
		default:
			if err := json.Unmarshal(keys[key], field.Addr().Interface()); err != nil {
				return fault.Field(at, "%s", wanted(field.Kind()))
			}
		}
	}
	return nil
}

// decodeList fills a slice of strings or of structs.
func decodeList(at string, raw json.RawMessage, field reflect.Value) error {
	var items []json.RawMessage
	if err := json.Unmarshal(raw, &items); err != nil {
		return fault.Field(at, "must be a list")
	}
	if len(items) == 0 {
		return fault.Field(at, "is empty; omit the key for its default")
	}
	list := reflect.MakeSlice(field.Type(), len(items), len(items))
	for i, item := range items {
		at := fmt.Sprintf("%s[%d]", at, i)
		if list.Index(i).Kind() == reflect.Struct {
			if err := decodeKeys(at, item, list.Index(i).Addr().Interface()); err != nil {
				return err
			}
			continue
		}
		if err := json.Unmarshal(item, list.Index(i).Addr().Interface()); err != nil || string(item) == "null" || string(item) == `""` {
			return fault.Field(at, "must be a non-empty string in quotes")
		}
	}
	field.Set(list)
	return nil
}

func wanted(kind reflect.Kind) string {
	switch kind {
	case reflect.Bool:
		return "must be true or false"
	case reflect.Map:
		return "must be a map"
	case reflect.Int64:
		return "must be a whole number"
	default:
		return "must be a string; put it in quotes"
	}
}

// fieldsByKey returns the fields of the struct that v points to by their keys in the file.
func fieldsByKey(v any) map[string]reflect.Value {
	fields := map[string]reflect.Value{}
	s := reflect.ValueOf(v).Elem()
	for i := range s.NumField() {
		switch key := s.Type().Field(i).Tag.Get("json"); {
		case key == ",inline":
			maps.Copy(fields, fieldsByKey(s.Field(i).Addr().Interface()))
		case key != "" && key != "-":
			fields[key] = s.Field(i)
		}
	}
	return fields
}
