package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	_ "embed"
)

// Addresses of the cluster that only the node knows.
const (
	ServiceIPs = "10.96.0.0/24"
	PodIPs     = "10.85.0.0/24"
	DNSIP      = "10.96.0.10"
	apiIP      = "10.96.0.1"
	APIPort    = 6443
	// Node is the node's name.
	Node = "node-1"
)

// Paths on the node.
const (
	etc      = "/etc/cluster"
	programs = "/opt/cluster/bin"
	// ContainerdSocket is where containerd answers.
	ContainerdSocket = "/run/containerd/containerd.sock"
	units            = "/etc/systemd/system"
	startTarget      = "kubernetes.target"
)

//go:embed node.tmpl
var nodeFiles string

// user is one who talks to the API server.
type user struct {
	file, name, groups string
	token              string
}

// parameters are what the node's files are made of.
type parameters struct {
	MachineIP, NodeIP, ServiceIPs, PodIPs, DNSIP, Node, Etc, Programs, Socket, Issuer, Registry string
	APIPort                                                                                     int
}

// files are the node's, by path. Their texts are in node.tmpl, one after the other behind lines that name them.
func (p parameters) files() (map[string]string, error) {
	t, err := template.New("").Parse(nodeFiles)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, p); err != nil {
		return nil, err
	}
	files := map[string]string{}
	for _, part := range strings.Split(b.String(), "\n=== ")[1:] {
		path, text, _ := strings.Cut(part, "\n")
		files[path] = text + "\n"
	}
	return files, nil
}

// kubeconfig lets a user in.
func kubeconfig(nodeIP, ca, token string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: cluster, cluster: {server: "https://%s:%d", certificate-authority: %s}}]
users: [{name: user, user: {token: %q}}]
contexts: [{name: context, context: {cluster: cluster, user: user}}]
current-context: context
`, nodeIP, APIPort, ca, token)
}

// writeFiles writes files below a directory.
func writeFiles(dir string, files map[string]string) error {
	var errs []error
	for path, text := range files {
		file := filepath.Join(dir, path)
		errs = append(errs, os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644))
	}
	return errors.Join(errs...)
}
