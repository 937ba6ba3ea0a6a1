package helper

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"
)

func bufioReader(b []byte) *bufio.Reader { return bufio.NewReader(bytes.NewReader(b)) }

func TestTailKeepsTheLastLines(t *testing.T) {
	var l tail
	for i := range 3 * tailLines {
		l.add(fmt.Sprint(i))
	}
	if got := l.snapshot(); len(got) != tailLines || got[0] != fmt.Sprint(2*tailLines) || got[tailLines-1] != fmt.Sprint(3*tailLines-1) {
		t.Errorf("%d lines: %q", len(got), got)
	}
}

func TestTail_KeepsTheReasonOfACrash(t *testing.T) {
	for _, why := range []string{"panic: boom", "fatal error: concurrent map writes", "thread 'main' (7) panicked at src/main.rs:3:5:"} {
		var l tail
		l.add("before")
		l.add(why)
		for i := range 3 * tailLines {
			l.add(fmt.Sprintf("frame %d", i))
		}
		if got := l.snapshot(); len(got) != tailLines+1 || got[0] != why || got[1] != fmt.Sprintf("frame %d", 2*tailLines) {
			t.Errorf("%d lines: %q", len(got), got)
		}
	}
}

func TestOutputIsCleaned(t *testing.T) {
	for raw, want := range map[string]string{
		"plain\r":                       "plain",
		"\x1b[1;31mred\x1b[0m \tx":      "red  x",
		"\x1b]0;title\a bell\b\x00":     "]0;title bell",
		"\xff\xfe broken":               "?? broken",
		"right\u202eto left\u2028lines": "rightto leftlines",
		"\x1b[":                         "",
		"ünïcode €":                     "ünïcode €",
	} {
		if got := clean([]byte(raw)); got != want {
			t.Errorf("%q: %q, want %q", raw, got, want)
		}
	}
	if got := shorten(strings.Repeat("€", 300)); len(got) > tailBytes || !utf8.ValidString(got) || !strings.HasSuffix(got, "…") {
		t.Errorf("shortened to %d bytes: %q", len(got), got)
	}
}

func TestLongLinesAreCutAndDoNotSwallowTheNext(t *testing.T) {
	var got []string
	var cuts []bool
	readLines(strings.NewReader("a\n"+strings.Repeat("x", 3*maxLine)+"\nb\n\nlast"), func(line []byte, cut bool) {
		got, cuts = append(got, string(line)), append(cuts, cut)
	})
	if len(got) != 5 || got[0] != "a" || len(got[1]) != maxLine || got[2] != "b" || got[3] != "" || got[4] != "last" ||
		fmt.Sprint(cuts) != "[false true false false false]" {
		t.Errorf("%d lines, cut %v", len(got), cuts)
	}
}

func TestLogFileIsBounded(t *testing.T) {
	path := t.TempDir() + "/log"
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l := newLogger(f, &scrubber{}, time.Now)
	for i := range 5000 {
		l.line(fmt.Sprintf("line %d %s", i, strings.Repeat("x", 100)))
	}
	body, err := os.ReadFile(path)
	if err != nil || len(body) > maxLog+1000 || !bytes.Contains(body, []byte("line 4999 ")) || !bytes.Contains(body, []byte("log truncated")) {
		t.Errorf("%d bytes, %v", len(body), err)
	}
}

func FuzzClean(f *testing.F) {
	for _, seed := range []string{"plain", "\x1b[31mred\x1b[0m", "\xff\x00", "\u202e", "a\tb\r"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		line := shorten(clean(raw))
		if len(line) > tailBytes || !utf8.ValidString(line) {
			t.Errorf("%d bytes: %q", len(line), line)
		}
		for _, r := range line {
			if !unicode.IsPrint(r) {
				t.Errorf("%q is left in %q", r, line)
			}
		}
	})
}
