package chart

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func readDocument(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The chart accepts the values that the pages on installing show.
func TestDocumentedValuesAreTaken(t *testing.T) {
	text := readDocument(t, root+"/docs/how-to/install.md") + readDocument(t, root+"/docs/how-to/aws.md") + readDocument(t,
		root+"/docs/how-to/platforms.md") + readDocument(t, root+"/docs/how-to/hardening.md") +
		readDocument(t, root+"/docs/how-to/upgrading.md") + readDocument(t, root+"/docs/how-to/credentials-setup.md") + readDocument(t, root+"/docs/how-to/minio.md")
	tried, secrets := 0, 0
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(text, -1) {
		if strings.Contains(block[1], "kind: Kustomization") {
			if image := "name: " + strings.Split(driverOf(t, one(t, template(t), "Deployment")).Image, ":")[0] + "\n"; !strings.Contains(block[1], image) {
				t.Errorf("the overlay names no image of the base:\n%s", block[1])
			}
			continue
		}
		if strings.HasPrefix(block[1], "apiVersion: ") { // for kubectl
			continue
		}
		tried++
		args := withValues(t, block[1])
		if strings.Contains(block[1], "controllerCredentials: secret") && strings.Contains(block[1], "secretNamespaces") {
			secrets++
			objects := template(t, args...)
			if have := rights(objects, "Role"); !slices.Contains(have, "s3-csi: /secrets[] get") {
				t.Errorf("the provisioner may not read the Secrets: %q", have)
			}
		}
		template(t, args...)
	}
	if secrets == 0 {
		t.Error("no values have a provisioner's secret")
	}
	if tried < 5 {
		t.Errorf("%d blocks of values", tried)
	}
	for _, set := range regexp.MustCompile(`--set ([\w.]+)=(\S+)`).FindAllStringSubmatch(text, -1) {
		template(t, "--set", set[1]+"="+set[2])
	}
}

// Values that the documentation mentions exist.
func TestDocumentsNameValues(t *testing.T) {
	known := map[string]bool{}
	roots := map[string]bool{}
	for _, r := range rows(t) {
		words := strings.Split(r.name, ".")
		roots[words[0]] = true
		for i := range words {
			known[strings.Join(words[:i+1], ".")] = true
		}
	}
	named := 0
	for _, file := range []string{root + "/docs/how-to/install.md", root + "/docs/how-to/off-cluster.md", root + "/docs/explanation/inline-volumes.md",
		root + "/docs/how-to/usage.md", root + "/README.md", chartDir + "/values.yaml", chartDir + "/templates/NOTES.txt", chartDir + "/templates/validate.yaml"} {
		for _, word := range regexp.MustCompile(`(?:^|[^\w.$/-])(\w+(?:\.\w+)+)`).FindAllStringSubmatch(readDocument(t, file), -1) {
			first, _, _ := strings.Cut(word[1], ".")
			if !roots[first] || first == "backends" || known[word[1]] || strings.Contains(word[1], ".md") {
				continue
			}
			t.Errorf("%s names %s, which is no value", file, word[1])
		}
		for name := range known {
			if strings.Contains(name, ".") && strings.Contains(readDocument(t, file), name) {
				named++
			}
		}
	}
	if named < 20 {
		t.Errorf("%d values are named in all documents", named)
	}
}
