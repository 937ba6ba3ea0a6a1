package cluster

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// Image is a container image of one layer.
type Image struct {
	Name       string            // with its tag
	Files      map[string]string // paths in the image, and the files of this machine that they are copies of
	Texts      map[string]string // further paths in the image, and their contents; those that begin with #! are executable
	Links      map[string]string // symbolic links in the image, and what they point to
	Dirs       []string
	Entrypoint []string
	Cmd        []string
}

// path that containers look programs up in.
const imagePath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Write writes the image in the format that docker save writes.
func (i Image) Write(w io.Writer) error {
	var layer bytes.Buffer
	if err := i.layer(&layer); err != nil {
		return fmt.Errorf("image %s: %w", i.Name, err)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Env": []string{imagePath}, "Cmd": i.Cmd, "Entrypoint": i.Entrypoint},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer.Bytes())}},
	})
	if err != nil {
		return err
	}
	name := digest(config) + ".json"
	manifest, err := json.Marshal([]any{map[string]any{"Config": name, "RepoTags": []string{i.Name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	return errors.Join(writeFile(t, name, config), writeFile(t, "layer.tar", layer.Bytes()), writeFile(t, "manifest.json", manifest), t.Close())
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func writeFile(t *tar.Writer, name string, content []byte) error {
	err := t.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))})
	if err == nil {
		_, err = t.Write(content)
	}
	return err
}

func (i Image) layer(w io.Writer) error {
	t := tar.NewWriter(w)
	made := map[string]bool{".": true}
	var mkdir func(dir string) error
	mkdir = func(dir string) error {
		if dir = path.Clean(strings.Trim(dir, "/")); made[dir] {
			return nil
		}
		made[dir] = true
		if err := mkdir(path.Dir(dir)); err != nil {
			return err
		}
		mode := int64(0o755)
		if dir == "tmp" {
			mode = 0o1777
		}
		return t.WriteHeader(&tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: mode})
	}
	for _, dir := range i.Dirs {
		if err := mkdir(dir); err != nil {
			return err
		}
	}
	file := func(name string, mode int64, content []byte) error {
		name = strings.Trim(name, "/")
		if err := mkdir(path.Dir(name)); err != nil {
			return err
		}
		if err := t.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content))}); err != nil {
			return err
		}
		_, err := t.Write(content)
		return err
	}
	for _, to := range sorted(i.Files) {
		content, err := os.ReadFile(i.Files[to])
		if err != nil {
			return err
		}
		mode := int64(0o644)
		if fi, err := os.Stat(i.Files[to]); err == nil && fi.Mode()&0o100 != 0 {
			mode = 0o755
		}
		if err := file(to, mode, content); err != nil {
			return err
		}
	}
	for _, to := range sorted(i.Texts) {
		mode := int64(0o644)
		if strings.HasPrefix(i.Texts[to], "#!") {
			mode = 0o755
		}
		if err := file(to, mode, []byte(i.Texts[to])); err != nil {
			return err
		}
	}
	for _, link := range sorted(i.Links) {
		name := strings.Trim(link, "/")
		if err := mkdir(path.Dir(name)); err != nil {
			return err
		}
		if err := t.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: i.Links[link], Mode: 0o777}); err != nil {
			return err
		}
	}
	return t.Close()
}

// dependency is a line of ldd about a library, or about the program that loads them.
var dependency = regexp.MustCompile(`(?m)^\s+(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$`)

// Programs are programs of this machine with the libraries that they are linked with, as files of an image at the same paths.
func Programs(ctx context.Context, programs ...string) (files map[string]string, err error) {
	files = map[string]string{}
	for _, program := range programs {
		out, err := exec.CommandContext(ctx, "ldd", program).CombinedOutput()
		libraries := dependency.FindAllSubmatch(out, -1)
		if err != nil || len(libraries) == 0 {
			return nil, fmt.Errorf("the libraries of %s: %w: %s", program, err, out)
		}
		files[program] = program
		for _, library := range libraries {
			files[string(library[1])] = string(library[1])
		}
	}
	return files, nil
}

func sorted(m map[string]string) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
