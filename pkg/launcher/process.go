// Package launcher brings helpers to life on a host.
package launcher

import (
	"context"
	"errors"
	"os"
)

// Unit is one helper to start.
type Unit struct {
	Name, Description string
	UID, GID          uint32
	StateDir          string
	Socket            *os.File // listening UNIX socket, made by helper.Listen
}

// Doer is the host's mount namespace (host.Namespace).
type Doer interface {
	Do(ctx context.Context, what string, fn func() error) error
	Foreign() bool
}

// Process launches helpers as plain children.
type Process struct {
	ns         Doer
	executable string
}

// NewProcess makes a launcher; it starts nothing.
func NewProcess(ns Doer, executable string) *Process {
	return &Process{ns: ns, executable: executable}
}

var errTODO = errors.New("not written yet")

// Start starts a unit's helper.
func (p *Process) Start(ctx context.Context, u Unit) error { return errTODO }

// Alive tells whether any process of that uid lives.
func (p *Process) Alive(ctx context.Context, uid uint32) (bool, error) { return false, errTODO }

// Kill ends every process of that uid.
func (p *Process) Kill(ctx context.Context, uid uint32) error { return errTODO }

// SurvivesDriver tells whether helpers outlive the driver, and why not.
func (p *Process) SurvivesDriver() (bool, string) { return false, "not written yet" }
