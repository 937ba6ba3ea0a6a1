package runner

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

// A client of another version that does not know a flag is a node's wrong set-up; whatever else ends it may pass.
func TestExitedEarly_NamesAnUnknownFlag(t *testing.T) {
	for _, tc := range []struct {
		code int
		line string
		flag string // "": another reason
	}{
		{2, "error: unexpected argument '--memory-target' found", "--memory-target"},
		{2, "flag provided but not defined: -read-cache", "--read-cache"},
		{1, "Error: cannot list bucket \"unexpected argument '--x'\"", ""},
		{2, "panic: runtime error", ""},
	} {
		err := exitedEarly("c", helper.Status{ExitCode: tc.code, Tail: []string{tc.line}})
		want := fault.Unavailable
		if tc.flag != "" {
			want = fault.Precondition
		}
		if !fault.Is(err, want) || !strings.Contains(err.Error(), tc.flag) {
			t.Errorf("%q: %v", tc.line, err)
		}
	}
}
