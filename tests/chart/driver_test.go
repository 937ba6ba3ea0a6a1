package chart

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// environment is that of a container without variables.
func environment() driver.Environment {
	return driver.Environment{
		Lookup:   func(string) (string, bool) { return "", false },
		Hostname: func() (string, error) { return "node", nil },
	}
}

// The driver accepts the arguments that the chart passes.
func TestFlagsAreTheDrivers(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		for _, o := range workloads(objects) {
			args := driverOf(t, o).Args
			options, err := driver.Parse(args, environment())
			if err != nil {
				t.Fatalf("%s: %q: %v", o.Metadata.Name, args, err)
			}
			want := driver.ModeController
			if o.Kind == "DaemonSet" {
				want = driver.ModeNode
			}
			if options.Mode != want {
				t.Errorf("%s runs in mode %s", o.Metadata.Name, options.Mode)
			}
		}
	})
}

// The chart and the driver have the same defaults.
func TestDefaultsAreTheDrivers(t *testing.T) {
	own := map[string]string{ // what the driver cannot know by itself
		"controller --http-endpoint": ":9811",
		"node --http-endpoint":       "127.0.0.1:9810",
		"node --target-root":         "/var/lib/kubelet",
		"node --node-dns":            "pod", // Services of the cluster are the usual endpoint
	}
	seen := 0
	for _, o := range workloads(template(t)) {
		args := driverOf(t, o).Args
		var options driver.Options
		flags := options.Flags(driver.Mode(args[0]))
		if err := flags.Parse(args[1:]); err != nil {
			t.Fatal(err)
		}
		flags.Visit(func(f *pflag.Flag) {
			seen++
			key := args[0] + " --" + f.Name
			want, ok := own[key]
			if !ok {
				want = f.DefValue
			}
			if f.Value.String() != want {
				t.Errorf("%s=%s, and without a word it is %s", key, f.Value, want)
			}
		})
	}
	if seen < 20 {
		t.Errorf("the chart passes %d flags", seen)
	}
}

// The driver or the AWS SDK reads every variable that the chart sets.
func TestVariables(t *testing.T) {
	known := []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"}
	known = append(known, driver.FlagVariables("node-id")...)
	// Those that commands in the container need have the values of the driver's own flags.
	same := map[string]string{}
	for _, flag := range []string{"config", "driver-name", "cluster-id", "state-dir"} {
		variable := driver.FlagVariables(flag)[0]
		known, same[variable] = append(known, variable), flag
	}
	for _, variant := range []string{"default", "driver-keys", "full"} {
		for _, o := range workloads(template(t, "--values", values(variant))) {
			have := map[string]int{}
			for _, e := range driverOf(t, o).Env {
				have[e.Name]++
				if !slices.Contains(known, e.Name) || have[e.Name] > 1 {
					t.Errorf("%s: %s has %s, %d times", variant, o.Metadata.Name, e.Name, have[e.Name])
				}
				if flag := same[e.Name]; flag != "" && !slices.Contains(driverOf(t, o).Args, "--"+flag+"="+e.Value) {
					t.Errorf("%s: %s has %s=%s, and other flags: %q", variant, o.Metadata.Name, e.Name, e.Value, driverOf(t, o).Args)
				}
			}
			if o.Kind == "DaemonSet" && have["CSI_NODE_NAME"] != 1 {
				t.Errorf("%s: %s does not know its node's name", variant, o.Metadata.Name)
			}
			if want := variant == "driver-keys" || variant == "full" && o.Kind == "Deployment"; (have["AWS_SECRET_ACCESS_KEY"] == 1) != want {
				t.Errorf("%s: %s has the driver's keys: %v", variant, o.Metadata.Name, !want)
			}
		}
	}
}

// The driver accepts the config file that the chart renders.
func TestBackendsAreTheDrivers(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant string, objects []object) {
		if variant == "private-ca" {
			return // its certificate is in no object of the chart
		}
		for _, o := range of(objects, "ConfigMap") {
			config, err := backend.ParseConfig([]byte(o.Data["config.yaml"]), "", "")
			if err != nil {
				t.Fatalf("%v in:\n%s", err, o.Data["config.yaml"])
			}
			for _, b := range config.Backends() {
				if b.CAFile == "" {
					continue
				}
				block, rest := pem.Decode([]byte(o.Data[filepath.Base(b.CAFile)]))
				if block == nil || strings.TrimSpace(string(rest)) != "" {
					t.Fatalf("there is no certificate for %s", b.CAFile)
				}
				if _, err := x509.ParseCertificate(block.Bytes); err != nil {
					t.Error(err)
				}
			}
		}
	})
}

// The schema has exactly the keys of the driver's config file.
func TestSchemaHasTheKeysOfTheConfigFile(t *testing.T) {
	s := readSchema(t)
	for at, c := range map[string]struct{ config, path string }{
		"a backend": {"backends: {x: {no-such-key: 1}}", "definitions/backend"},
		"sts":       {"backends: {x: {sts: {no-such-key: 1}}}", "definitions/backend/properties/sts"},
		"a rule":    {"backends: {x: {allow: [{no-such-key: 1}]}}", "definitions/backend/properties/allow/items"},
		"a client":  {"clients: {x: {no-such-key: 1}}", "definitions/client"},
		"arguments": {"clients: {x: {argsIf: {no-such-key: 1}}}", "definitions/client/properties/argsIf"},
		"an option": {"clients: {x: {options: {y: {no-such-key: 1}}}}", "definitions/clientOption"},
	} {
		_, err := backend.ParseConfig([]byte(c.config), "", "")
		if err == nil {
			t.Fatalf("%s: an unknown key was accepted", at)
		}
		_, list, ok := strings.Cut(err.Error(), "known here: ")
		if !ok {
			t.Fatalf("%s: %v", at, err)
		}
		known := strings.Split(list, ", ")
		have := slices.Sorted(maps.Keys(s.at(t, c.path).Properties))
		slices.Sort(known)
		if !slices.Equal(have, known) {
			t.Errorf("%s: the schema has %q, the driver %q", at, have, known)
		}
	}
}

func TestSchemaHasTheChoicesOfTheDriver(t *testing.T) {
	s := readSchema(t)
	for path, want := range map[string][]any{
		"properties/node/properties/launcher":  {driver.LauncherAuto, driver.LauncherSystemd, driver.LauncherProcess},
		"properties/node/properties/dns":       {"pod", "host"},
		"properties/logging/properties/format": {"text", "json"},
	} {
		have := s.at(t, path).Enum
		if fmt.Sprint(sorted(have)) != fmt.Sprint(sorted(want)) {
			t.Errorf("%s: %v, want %v", path, have, want)
		}
	}
	// What the schema lets pass as one of a choice, the driver does.
	for _, value := range s.at(t, "properties/node/properties/dns").Enum {
		if _, err := driver.Parse([]string{"node", fmt.Sprint("--node-dns=", value)}, environment()); err != nil {
			t.Error(err)
		}
	}
}

func sorted(values []any) []string {
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = fmt.Sprint(v)
	}
	slices.Sort(texts)
	return texts
}

// The driver accepts the StorageClasses of the variants.
func TestStorageClassesAreTheDrivers(t *testing.T) {
	checked := 0
	helm(t)
	for _, variant := range variants(t) {
		objects := template(t, "--values", values(variant))
		for _, o := range of(objects, "StorageClass") {
			checked++
			if err := checkClass(o); err != nil {
				t.Errorf("%s: %s: %v", variant, o.Metadata.Name, err)
			}
			for _, d := range workloads(objects) {
				if name := driverOf(t, d).flag("driver-name"); o.Provisioner != name {
					t.Errorf("%s: %s is of %s, the driver is %s", variant, o.Metadata.Name, o.Provisioner, name)
				}
			}
		}
	}
	if checked < 3 {
		t.Errorf("%d classes in all variants", checked)
	}
}

func checkClass(o object) error {
	const name = "pvc-5b4a4d0e-8a55-4d0c-b6a4-cf1f6fd5e0a1"
	parameters := map[string]string{
		"csi.storage.k8s.io/pvc/namespace": "default", "csi.storage.k8s.io/pvc/name": "data", "csi.storage.k8s.io/pv/name": name,
	}
	for key, value := range o.Parameters {
		if !strings.HasPrefix(key, "csi.storage.k8s.io/") { // external-provisioner keeps its own to itself
			parameters[key] = value
		}
	}
	p, err := volume.ParseParameters(parameters, name)
	if err != nil {
		return err
	}
	c, err := client.Get(p.Node.Client)
	if err != nil {
		return err
	}
	options, err := volume.ParseMountOptions(o.MountOptions, "mountOptions")
	return errors.Join(err, c.Check(append(p.Node.MountOptions, options...), "mountOptions"))
}

func TestTokensThatKubeletBrings(t *testing.T) {
	for name, c := range map[string]struct {
		values    string
		audiences string
	}{
		"no config is AWS":         {"", "sts.amazonaws.com:3600"},
		"AWS":                      {"backends: {default: {region: eu-central-1}}", "sts.amazonaws.com:3600"},
		"AWS with another":         {"backends: {default: {sts: {audience: mine}}}", "mine:3600"},
		"a service without STS":    {"backends: {lab: {endpoint: 'https://s3.example.com'}}", ""},
		"a service without tokens": {"backends: {lab: {endpoint: 'https://s3.example.com', sts: {}}}", ""},
		"several": {"backends: {a: {}, b: {endpoint: 'https://s3.example.com', sts: {audience: b}}, c: {endpoint: 'https://c.example.com', sts: " +
			"{audience: b}}}", "b:3600 sts.amazonaws.com:3600"},
		"pod identity":      {"csiDriver: {tokenRequests: {podIdentity: true}}", "pods.eks.amazonaws.com:3600 sts.amazonaws.com:3600"},
		"nothing by itself": {"csiDriver: {tokenRequests: {derive: false}}", ""},
		"given instead":     {"csiDriver: {tokenRequests: {derive: false, additional: [{audience: x, expirationSeconds: 600}]}}", "x:600"},
		"given as well": {"csiDriver: {tokenRequests: {expirationSeconds: 900, additional: [{audience: sts.amazonaws.com, expirationSeconds: 7200}]}}",
			"sts.amazonaws.com:7200"},
	} {
		t.Run(name, func(t *testing.T) {
			csi := one(t, template(t, withValues(t, c.values)...), "CSIDriver")
			var have []string
			for _, r := range csi.Spec.TokenRequests {
				have = append(have, fmt.Sprintf("%s:%d", r.Audience, r.ExpirationSeconds))
			}
			if strings.Join(have, " ") != c.audiences {
				t.Errorf("%q, want %q", have, c.audiences)
			}
			// The API server refuses the one without the other.
			if csi.Spec.TokenInSecrets != (c.audiences != "") {
				t.Errorf("serviceAccountTokenInSecrets is %v with the tokens %q", csi.Spec.TokenInSecrets, have)
			}
		})
	}
}

func TestTokensAreInSecretsWhereTheClusterCan(t *testing.T) {
	for _, c := range []struct {
		cluster, value string
		want           bool
	}{
		{"1.34.5", "auto", false},
		{"1.35.0", "auto", true},
		{"1.35.2-eks-1234567", "auto", true},
		{"1.37.0", "auto", true},
		{"1.34.5", "true", true},
		{"1.36.0", "false", false},
	} {
		out, all, err := run(t, helm(t), "template", release, chartDir, "--kube-version", c.cluster, "--set", "csiDriver.serviceAccountTokenInSecrets="+c.value)
		if err != nil {
			t.Fatal(err, all)
		}
		if have := one(t, parse(t, out), "CSIDriver").Spec.TokenInSecrets; have != c.want {
			t.Errorf("Kubernetes %s, %s: %v", c.cluster, c.value, have)
		}
	}
}

func TestInlineVolumes(t *testing.T) {
	for variant, want := range map[string]string{"default": "[Persistent]", "inline-volumes": "[Persistent Ephemeral]"} {
		objects := template(t, "--values", values(variant))
		csi := one(t, objects, "CSIDriver")
		if have := fmt.Sprint(csi.Spec.VolumeLifecycleModes); have != want {
			t.Errorf("%s: %s, want %s", variant, have, want)
		}
		// kubelet asks for what the object says, and the driver does what its flag says: neither is of use without the other.
		options, err := driver.Parse(driverOf(t, one(t, objects, "DaemonSet")).Args, environment())
		if err != nil {
			t.Fatal(err)
		}
		if on := strings.Contains(want, "Ephemeral"); options.Node.InlineVolumes != on {
			t.Errorf("%s: --inline-volumes=%t beside %s", variant, options.Node.InlineVolumes, want)
		}
	}
}

// The units of an off-cluster controller pass the same arguments as the chart.
func TestOffClusterUnits(t *testing.T) {
	deployment := one(t, template(t), "Deployment")
	for unit, check := range map[string]func(args []string){
		"s3-csi-controller": func(args []string) {
			options, err := driver.Parse(args, environment())
			if err != nil || options.Mode != driver.ModeController {
				t.Errorf("%q: mode %s, %v", args, options.Mode, err)
			}
		},
		"s3-csi-provisioner": func(args []string) {
			differs := map[string]bool{"--csi-address": true, "--leader-election-namespace": true} // places
			have, want := flagsOf(args), flagsOf(containerOf(t, deployment, "csi-provisioner").Args)
			if have["--kubeconfig"] == "" {
				t.Error("the provisioner has no kubeconfig")
			}
			delete(have, "--kubeconfig")
			for _, key := range slices.Concat(slices.Collect(maps.Keys(have)), slices.Collect(maps.Keys(want))) {
				_, inHave := have[key]
				_, inWant := want[key]
				if inHave != inWant || have[key] != want[key] && !differs[key] {
					t.Errorf("%s is %q, in the cluster %q", key, have[key], want[key])
				}
			}
		},
	} {
		text, err := os.ReadFile(deployDir + "/off-cluster/" + unit + ".service")
		if err != nil {
			t.Fatal(err)
		}
		line := regexp.MustCompile(`(?m)^ExecStart=\S+ (.*)$`).FindStringSubmatch(string(text))
		if line == nil {
			t.Fatalf("%s starts nothing", unit)
		}
		check(strings.Fields(line[1]))
	}
}

func flagsOf(args []string) map[string]string {
	flags := map[string]string{}
	for _, arg := range args {
		name, value, _ := strings.Cut(arg, "=")
		flags[name] = value
	}
	return flags
}
