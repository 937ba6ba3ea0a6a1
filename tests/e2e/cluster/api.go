package cluster

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// api is a client of the API server: asking often costs far less with it than with kubectl.
type api struct {
	url, token string
	http       *http.Client
}

// apiTimeout bounds one request. 20 seconds were too short on a busy machine.
const apiTimeout = time.Minute

func newAPI(nodeIP, token string, ca []byte) (*api, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("no certificate of an authority")
	}
	return &api{
		url: fmt.Sprintf("https://%s:%d", nodeIP, APIPort), token: token,
		http: &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}}},
	}, nil
}

var (
	// ErrNotFound says that the API server has no such object.
	ErrNotFound = errors.New("not found")
	// ErrExists says that it has one already.
	ErrExists = errors.New("exists")
)

// Get asks the API server for a path, such as /api/v1/nodes.
func (c *Cluster) Get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	body, err := c.api.request(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

// Create makes an object, written as YAML, at the path of its kind. A field that the kind does not have is an error.
func (c *Cluster) Create(ctx context.Context, path, object string) error {
	return c.change(ctx, http.MethodPost, path+"?fieldValidation=Strict", strings.NewReader(object))
}

// Delete asks for the deletion of an object, and of what it owns after it.
func (c *Cluster) Delete(ctx context.Context, path string) error {
	return c.change(ctx, http.MethodDelete, path+"?propagationPolicy=Background", nil)
}

func (c *Cluster) change(ctx context.Context, method, path string, in io.Reader) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	body, err := c.api.request(ctx, method, path, in)
	if err != nil {
		return err
	}
	return body.Close()
}

// Watch gives what happens to objects at a path from now on, an event in each line, until ctx ends. What is there already comes first.
func (c *Cluster) Watch(ctx context.Context, path string) (io.ReadCloser, error) {
	return c.api.request(ctx, http.MethodGet, path+"?watch=true", nil)
}

// request gives the body of a good answer.
func (a *api) request(ctx context.Context, method, path string, in io.Reader) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, method, a.url+path, in)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+a.token)
	req.Header.Set("Content-Type", "application/yaml")
	resp, err := a.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode < http.StatusMultipleChoices {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNotFound {
		return nil, fmt.Errorf("%s: %w", path, ErrNotFound)
	}
	text, err := io.ReadAll(resp.Body)
	if resp.StatusCode == http.StatusConflict && method == http.MethodPost {
		return nil, fmt.Errorf("%s: %w: %s", path, ErrExists, text)
	}
	return nil, errors.Join(fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text), err)
}
