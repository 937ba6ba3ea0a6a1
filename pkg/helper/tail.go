package helper

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

const (
	tailLines = 40      // lines of the client's output that are kept
	tailBytes = 600     // bytes of each line
	maxLine   = 8 << 10 // bytes of a line that are read; the rest is dropped
)

// tail keeps the last lines of a client's output. After a crash it also keeps the line with the reason, because the stack trace
// that follows is longer than the tail.
type tail struct {
	mu    sync.Mutex
	lines []string // the oldest first
	crash string   // the latest first line of a crash that has left lines
}

func (t *tail) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.lines) == tailLines {
		if startsCrash(t.lines[0]) {
			t.crash = t.lines[0]
		}
		t.lines = slices.Delete(t.lines, 0, 1)
	}
	t.lines = append(t.lines, line)
}

func (t *tail) snapshot() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.crash == "" {
		return slices.Clone(t.lines)
	}
	return append([]string{t.crash}, t.lines...)
}

// startsCrash reports whether a line is the first that a Go program (rclone) or a Rust program (Mountpoint) prints when it
// crashes.
func startsCrash(line string) bool {
	return strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") ||
		strings.HasPrefix(line, "thread '") && strings.Contains(line, " panicked at")
}

func (t *tail) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines, t.crash = nil, ""
}

// readLines calls each for every line of r until r ends or fails. Lines come without their end, cut off at maxLine bytes; cut
// reports that.
func readLines(r io.Reader, each func(line []byte, cut bool)) {
	in := bufio.NewReaderSize(r, maxLine+1)
	for cut := false; ; {
		line, err := in.ReadSlice('\n')
		line, ended := bytes.CutSuffix(line, []byte("\n"))
		rest := cut // of a line that was cut off
		if cut = errors.Is(err, bufio.ErrBufferFull); !rest && (ended || len(line) > 0) {
			each(line[:min(len(line), maxLine)], cut)
		}
		if err != nil && !cut {
			return
		}
	}
}

// clean makes a printable line of a client's output: it drops terminal sequences and unprintable characters and replaces tabs
// by spaces and invalid UTF-8 by "?".
func clean(raw []byte) string {
	var b strings.Builder
	b.Grow(len(raw))
	for len(raw) > 0 {
		if raw[0] == 0x1b {
			raw = raw[escapeLen(raw):]
			continue
		}
		r, size := utf8.DecodeRune(raw)
		raw = raw[size:]
		switch {
		case r == utf8.RuneError && size == 1:
			b.WriteByte('?')
		case r == '\t':
			b.WriteByte(' ')
		case unicode.IsPrint(r):
			b.WriteRune(r)
		}
	}
	return strings.TrimSpace(b.String())
}

// escapeLen returns the length of the terminal sequence at the start of raw: ESC [ parameters final (ECMA-48), or ESC alone.
func escapeLen(raw []byte) int {
	if len(raw) < 2 || raw[1] != '[' {
		return 1
	}
	for i := 2; i < len(raw); i++ {
		if raw[i] >= 0x40 && raw[i] <= 0x7e {
			return i + 1
		}
		if raw[i] < 0x20 || raw[i] > 0x7e {
			return i
		}
	}
	return len(raw)
}

// shorten cuts a line to tailBytes at the start of a rune.
func shorten(line string) string {
	if len(line) <= tailBytes {
		return line
	}
	const mark = "…"
	end := tailBytes - len(mark)
	for end > 0 && !utf8.RuneStart(line[end]) {
		end--
	}
	return line[:end] + mark
}
