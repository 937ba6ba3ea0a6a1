package rig

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// EnvRace says that the programs are built with the race detector and report races to rigs (tests/internal/race).
const EnvRace = "S3CSI_RACE"

// races is where the rig's programs report data races, whichever user they run as.
func (r *Rig) races() string { return filepath.Join(r.Dir, "races") }

func (r *Rig) makeRaces() error {
	return errors.Join(os.Mkdir(r.races(), 0o755), os.Chmod(r.races(), 0o777|os.ModeSticky))
}

// raceEnvironment saves a driver that reports races to this rig from executing itself again, as tests/internal/race has it.
func (r *Rig) raceEnvironment() []string {
	if os.Getenv(EnvRace) == "" {
		return nil
	}
	return []string{"GORACE=atexit_sleep_ms=50 log_path=" + filepath.Join(r.races(), driverProgram)}
}

// Races is an error if a driver, helper or client of the rig reported a data race.
func (r *Rig) Races() error {
	total := regexp.MustCompile(`^Found \d+ data race\(s\)$`) // the last line of a program that ends
	files, err := filepath.Glob(filepath.Join(r.races(), "*"))
	for _, file := range files {
		text, e := os.ReadFile(file)
		err = errors.Join(err, e)
		for report := range strings.SplitSeq(string(text), "==================") {
			if report = strings.TrimSpace(report); report != "" && !total.MatchString(report) && !ofVFS(report) {
				err = errors.Join(err, fmt.Errorf("%s: %s", filepath.Base(file), report))
			}
		}
	}
	if strings.Contains(r.Logs(), "WARNING: DATA RACE") {
		err = errors.Join(err, errors.New("a data race is in the drivers' log"))
	}
	return err
}

// ofVFS reports whether both accesses of a race are made by the code of rclone's VFS, which reads names that a rename changes without
// its lock. All that calls it is the client's.
func ofVFS(report string) bool {
	accesses := regexp.MustCompile(`(?im)^ *(?:previous )?(?:atomic )?(?:read|write) at .*:\n +(\S+)`).FindAllStringSubmatch(report, -1)
	return len(accesses) == 2 && !slices.ContainsFunc(accesses, func(a []string) bool { return !strings.HasPrefix(a[1], "github.com/rclone/rclone/vfs") })
}
