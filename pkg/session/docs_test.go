package session

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
)

// The examples in the pages that set up credentials are what the driver, or at least a parser, takes.
func TestTheDocumentedExamplesAreTaken(t *testing.T) {
	var doc []byte
	for _, page := range []string{"credentials-setup", "minio"} {
		text, err := os.ReadFile("../../docs/how-to/" + page + ".md")
		must(t, err)
		doc = append(doc, text...)
	}
	configs := 0
	for _, block := range regexp.MustCompile("(?s)```([a-z]+)\n(.*?)```").FindAllStringSubmatch(string(doc), -1) {
		language, text := block[1], block[2]
		var object map[string]any
		var err error
		switch {
		case strings.HasPrefix(text, "backends:"):
			configs++
			_, err = backend.ParseConfig(onlyBackends(t, text), "", "")
		case language == "yaml":
			err = yaml.UnmarshalStrict([]byte(text), &object)
		case language == "json":
			err = json.Unmarshal([]byte(text), &object)
		}
		if err != nil {
			t.Errorf("%v:\n%s", err, text)
		}
	}
	if configs < 3 {
		t.Errorf("only %d configs are shown", configs)
	}
}

// onlyBackends returns the part of the chart's values that becomes the config file.
func onlyBackends(t *testing.T, values string) []byte {
	t.Helper()
	var v struct {
		Backends map[string]any `json:"backends"`
	}
	must(t, yaml.Unmarshal([]byte(values), &v))
	text, err := yaml.Marshal(map[string]any{"backends": v.Backends})
	must(t, err)
	return text
}
