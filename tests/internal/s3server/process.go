package s3server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// The environment variables through which a server process takes its root keys: a command line can be read by everybody.
const (
	EnvRootAccessKey = "S3SERVER_ROOT_ACCESS_KEY"
	EnvRootSecretKey = "S3SERVER_ROOT_SECRET_KEY"
)

// Process is a server in a process of its own. It is killed with the process that started it.
type Process struct {
	cmd      *exec.Cmd
	endpoint string
	sts      string
	region   string
	root     credentials.Keys

	mu  sync.Mutex // one control exchange at a time
	in  io.WriteCloser
	out *bufio.Reader
}

// StartProcess starts the server program (see Binary) and returns when it answers.
func StartProcess(ctx context.Context, opts Options) (*Process, error) {
	bin, err := Binary()
	if err != nil {
		return nil, err
	}
	if opts.Region == "" {
		opts.Region = DefaultRegion
	}
	root := credentials.Keys{AccessKeyID: opts.RootAccessKey, SecretAccessKey: opts.RootSecretKey}
	if root.IsZero() {
		root = newKeys()
	}
	// Not CommandContext: ctx bounds the start, not the life.
	cmd := exec.Command(bin, "--control", "--dir", opts.Dir, "--addr", opts.Addr, "--region", opts.Region,
		"--cert-file", opts.CertFile, "--key-file", opts.KeyFile, "--sts-addr", opts.STSAddr)
	cmd.Env = append(os.Environ(), EnvRootAccessKey+"="+root.AccessKeyID, EnvRootSecretKey+"="+root.SecretAccessKey)
	cmd.Stderr = os.Stderr
	// A process group of its own: Ctrl-C reaches the test, which stops the server when it is done with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("s3server: %w", err)
	}
	p := &Process{cmd: cmd, region: opts.Region, root: root, in: in, out: bufio.NewReader(stdout)}
	unwatch := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	line, err := p.out.ReadString('\n')
	if !unwatch() || err != nil {
		_ = cmd.Process.Kill()
		return nil, fmt.Errorf("s3server: the process said no endpoint: %w", errors.Join(ctx.Err(), err, cmd.Wait()))
	}
	p.endpoint = strings.TrimSpace(line)
	if err := p.setUp(ctx, opts.STS); err != nil {
		_ = cmd.Process.Kill()
		return nil, errors.Join(err, cmd.Wait())
	}
	return p, nil
}

// setUp makes the security token service known and what it is to be.
func (p *Process) setUp(ctx context.Context, behaviour STS) error {
	rep, err := p.ask(request{Op: "sts"})
	if err != nil {
		return err
	}
	p.sts = rep.Text
	return p.SetSTS(ctx, behaviour)
}

// Endpoint is the server's URL.
func (p *Process) Endpoint() string { return p.endpoint }

// Region is the server's region.
func (p *Process) Region() string { return p.region }

// Keys are the root user's.
func (p *Process) Keys() credentials.Keys { return p.root }

// PID is the process's id, for tests that stop and continue or kill a server.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// AddUser is Server.AddUser.
func (p *Process) AddUser(_ context.Context, name, policy string) (credentials.Keys, error) {
	return p.call(request{Op: "addUser", Name: name, Policy: policy})
}

// SetPolicy is Server.SetPolicy.
func (p *Process) SetPolicy(_ context.Context, name, policy string) error {
	_, err := p.call(request{Op: "setPolicy", Name: name, Policy: policy})
	return err
}

// AddKey is Server.AddKey.
func (p *Process) AddKey(_ context.Context, name string) (credentials.Keys, error) {
	return p.call(request{Op: "addKey", Name: name})
}

// RemoveKey is Server.RemoveKey.
func (p *Process) RemoveKey(_ context.Context, name, accessKeyID string) error {
	_, err := p.call(request{Op: "removeKey", Name: name, Key: accessKeyID})
	return err
}

// STS is Server.STS.
func (p *Process) STS() string { return p.sts }

// SetSTS is Server.SetSTS.
func (p *Process) SetSTS(_ context.Context, behaviour STS) error {
	_, err := p.ask(request{Op: "setSTS", STS: &behaviour})
	return err
}

// STSCalls is Server.STSCalls.
func (p *Process) STSCalls(context.Context) (STSCalls, error) {
	rep, err := p.ask(request{Op: "stsCalls"})
	if err != nil {
		return STSCalls{}, err
	}
	return *rep.Calls, nil
}

// SetRole is Server.SetRole.
func (p *Process) SetRole(_ context.Context, role Role) (arn string, err error) {
	rep, err := p.ask(request{Op: "setRole", Role: &role})
	return rep.Text, err
}

// AddIssuer is Server.AddIssuer.
func (p *Process) AddIssuer(_ context.Context, url string, audiences ...string) error {
	_, err := p.ask(request{Op: "addIssuer", URL: url, Audiences: audiences})
	return err
}

// RevokeSessions is Server.RevokeSessions.
func (p *Process) RevokeSessions(_ context.Context, arn string) error {
	_, err := p.ask(request{Op: "revokeSessions", ARN: arn})
	return err
}

func (p *Process) call(req request) (credentials.Keys, error) {
	rep, err := p.ask(req)
	return credentials.Keys{AccessKeyID: rep.AccessKeyID, SecretAccessKey: rep.SecretAccessKey}, err
}

func (p *Process) ask(req request) (reply, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := json.NewEncoder(p.in).Encode(req); err != nil {
		return reply{}, fmt.Errorf("s3server: %w", err)
	}
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		return reply{}, fmt.Errorf("s3server: no answer: %w", err)
	}
	var rep reply
	if err := json.Unmarshal(line, &rep); err != nil {
		return reply{}, fmt.Errorf("s3server: answer: %w", err)
	}
	if rep.Error != "" {
		return reply{}, errors.New(rep.Error)
	}
	return rep, nil
}

// Stop ends the process, by force if it does not end by itself.
func (p *Process) Stop() error {
	p.in.Close() // end of control: it stops
	kill := time.AfterFunc(stopTimeout, func() { _ = p.cmd.Process.Kill() })
	defer kill.Stop()
	return p.cmd.Wait()
}
