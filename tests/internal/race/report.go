//go:build race

// make race compiles this file into the driver, the helper and the rclone client, where they are built with the race detector.
package main

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
)

// The detector reads GORACE before main, and helpers and clients start with an environment of the driver's making. Each program
// therefore sets it and executes itself again: reports go to the directory beside the program's where package rig looks for them, and
// a program does not sleep for a second when it exits.
func init() {
	program, err := os.Executable()
	if err != nil {
		panic(err)
	}
	if os.Getenv("GORACE") == "" && !slices.Equal(os.Args[1:], []string{"--version"}) { // the version is printed by one goroutine
		options := "atexit_sleep_ms=50"
		reports := filepath.Join(filepath.Dir(filepath.Dir(program)), "races")
		if _, err := os.Stat(reports); err == nil {
			options += " log_path=" + filepath.Join(reports, filepath.Base(program))
		}
		panic(syscall.Exec(program, os.Args, append(os.Environ(), "GORACE="+options)))
	}
	if len(os.Args) == 2 && os.Args[1] == "provoke-race" {
		provoke()
		os.Exit(0)
	}
}

// provoke is a race, which shows that races are reported.
func provoke() {
	var n int
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() { n++ })
	}
	both.Wait()
	_ = n
}
