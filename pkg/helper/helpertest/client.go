// Package helpertest is a stand-in for a FUSE client, for tests of what runs clients. A test binary calls Client from its
// TestMain when it was started as one (IsClient), and copies itself with Program to where any uid can execute it.
package helpertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// mode is the first argument of a stand-in.
const mode = "stand-in-client"

// Argv is the command line of a stand-in that does the steps one after the other and then exits with 0:
//
//	print:<text>       a line on standard output
//	shout:<text>       a line on standard error
//	wait:<path>        until the file is there
//	exit:<code>        end
//	credentials        ask for credentials, print the access key id, and how they expire
//	leak               ask for credentials and print them all
//	wrong:<n>          ask n times with a wrong token and print the statuses that came
//	fds                print every open descriptor and where it leads
//	self               print what /proc/self/status says about privileges, on one line
//	open:<path>        try to open a file and print how that went
//	env:<name>         print a variable
//	child              leave a process behind that holds all descriptors
//	ignore             ignore SIGTERM
//	flushes:<path>     print "flushed 0" for each SIGTERM, once the file is there, and remove that
func Argv(program string, steps ...string) []string {
	return append([]string{program, mode}, steps...)
}

// IsClient reports whether this process was started as a stand-in.
func IsClient() bool { return len(os.Args) > 1 && os.Args[1] == mode }

// Program copies the running binary to dir, executable for all users, and returns its path.
func Program(t testing.TB, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "stand-in")
	Copy(t, path, 0o755)
	return path
}

// Copy makes a copy of the running binary that can be executed at once. A child that another goroutine forks while the file is open has
// it open for writing, too, until it executes its own program, and such a file cannot be executed.
func Copy(t testing.TB, path string, mode os.FileMode) {
	t.Helper()
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := errors.Join(os.WriteFile(path, self, mode), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
}

// Client is the stand-in's main function; it returns the exit code.
func Client() int {
	for _, step := range os.Args[2:] {
		name, arg, _ := strings.Cut(step, ":")
		switch name {
		case "print":
			fmt.Println(arg)
		case "shout":
			fmt.Fprintln(os.Stderr, arg)
		case "wait":
			for _, err := os.Stat(arg); err != nil; _, err = os.Stat(arg) {
				time.Sleep(5 * time.Millisecond)
			}
		case "exit":
			code, _ := strconv.Atoi(arg)
			return code
		case "credentials":
			c, status := ask(os.Getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN"))
			fmt.Printf("credentials %d %s %s\n", status, c["AccessKeyId"], c["Expiration"])
		case "leak":
			c, _ := ask(os.Getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN"))
			fmt.Printf("leak %s %s %s\n", c["SecretAccessKey"], c["Token"], os.Getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN"))
		case "wrong":
			n, _ := strconv.Atoi(arg)
			came := map[int]bool{}
			for range n {
				_, status := ask("wrong")
				came[status] = true
			}
			fmt.Println("wrong", slices.Sorted(maps.Keys(came)))
		case "fds":
			fmt.Println("fds " + strings.Join(fds(), " "))
		case "self":
			fmt.Println("self " + self())
		case "open":
			f, err := os.OpenFile(arg, os.O_RDWR, 0)
			if err == nil {
				_ = f.Close()
			}
			fmt.Printf("open %v\n", err)
		case "env":
			fmt.Println("env " + os.Getenv(arg))
		case "child":
			_, err := os.StartProcess("/proc/self/exe", Argv("child", "wait:/nowhere"), &os.ProcAttr{
				Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, os.NewFile(3, "fuse")},
			})
			fmt.Printf("child %v\n", err)
		case "ignore":
			signal.Ignore(syscall.SIGTERM)
		case "flushes":
			signals := make(chan os.Signal, 1)
			signal.Notify(signals, syscall.SIGTERM)
			go func() {
				for range signals {
					for os.Remove(arg) != nil {
						time.Sleep(5 * time.Millisecond)
					}
					fmt.Println("flushed 0")
				}
			}()
		default:
			fmt.Println("unknown step " + step)
			return 2
		}
	}
	return 0
}

func ask(token string) (map[string]string, int) {
	req, err := http.NewRequest(http.MethodGet, os.Getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI"), nil) //nolint:noctx,gosec // the helper's address
	if err != nil {
		return nil, -1
	}
	req.Header.Set("Authorization", token)
	resp, err := http.DefaultClient.Do(req) //nolint:gosec // where the helper says
	if err != nil {
		fmt.Println(err)
		return nil, -1
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	c := map[string]string{}
	_ = json.Unmarshal(body, &c)
	return c, resp.StatusCode
}

func fds() []string {
	entries, _ := os.ReadDir("/proc/self/fd")
	var list []string
	for _, e := range entries {
		link, err := os.Readlink("/proc/self/fd/" + e.Name())
		// Descriptors that this program has opened itself are not inherited ones.
		if err != nil || strings.HasPrefix(link, "anon_inode:") || strings.HasPrefix(link, "/proc/") || strings.HasPrefix(link, "/sys/") {
			continue
		}
		list = append(list, e.Name()+"="+link)
	}
	sort.Strings(list)
	return list
}

func self() string {
	status, _ := os.ReadFile("/proc/self/status")
	var list []string
	for line := range strings.SplitSeq(string(status), "\n") {
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Umask":
			list = append(list, key+"="+strings.Join(strings.Fields(value), ","))
		}
	}
	cwd, _ := os.Getwd()
	return strings.Join(append(list, "cwd="+cwd), " ")
}
