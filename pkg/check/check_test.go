package check

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
)

func example() Report {
	return NewReport(
		Section{Name: "backend lab (https://s3.example)", Rows: []Row{
			Needed("reachable", "the service answers").Row(Yes, "https://s3.example", ""),
			Needed("conditionalWrites", "conditional writes").Row(No, "two controllers could make the same volume twice", "set singleController: true"),
			Optional("versioning", "versions").Row(Yes, "", ""),
		}},
		Section{Name: "node", Rows: []Row{
			Optional("cgroups", "one hierarchy of cgroups").Row(No, "version 1 & <old>", ""),
			Needed("fuseMount", "mounting FUSE").Row(Unknown, "there is no device", ""),
		}},
	)
}

func TestReport_Table(t *testing.T) {
	var b strings.Builder
	if err := example().Table(&b); err != nil {
		t.Fatal(err)
	}
	const want = `backend lab (https://s3.example)
  yes      the service answers       https://s3.example
! no       conditional writes        two controllers could make the same volume twice
                                     -> set singleController: true
  yes      versions

node
  no       one hierarchy of cgroups  version 1 & <old>
! unknown  mounting FUSE             there is no device

Required, but missing or unknown (marked with "!"): 2
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	if err := NewReport(Section{Name: "node"}).Table(&b); err != nil || b.String() != "node\n\nEverything that the driver needs is available.\n" {
		t.Errorf("%q, %v", b.String(), err)
	}
}

func TestReport_JSON(t *testing.T) {
	var b strings.Builder
	if err := example().JSON(&b); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "version 1 & <old>") {
		t.Errorf("characters are escaped that need not be:\n%s", b.String())
	}
	var back struct {
		OK       bool
		Sections []struct {
			Name string
			Rows []map[string]any
		}
	}
	if err := json.Unmarshal([]byte(b.String()), &back); err != nil {
		t.Fatal(err)
	}
	row := back.Sections[0].Rows[1]
	if back.OK || len(back.Sections) != 2 || row["check"] != "conditionalWrites" || row["result"] != "no" || row["needed"] != true ||
		row["advice"] != "set singleController: true" {
		t.Errorf("%+v", back)
	}
}

func TestReport_OnlyNeededRowsCount(t *testing.T) {
	for _, tc := range []struct {
		name   string
		needed bool
		result Result
		want   bool
	}{
		{"there", true, Yes, true}, {"not there", true, No, false}, {"not known", true, Unknown, false},
		{"not there and not needed", false, No, true}, {"not known and not needed", false, Unknown, true},
	} {
		if got := NewReport(Section{Rows: []Row{NeededIf(tc.needed, "x", "x").Row(tc.result, "", "")}}).OK; got != tc.want {
			t.Errorf("%s: %t", tc.name, got)
		}
	}
}

func TestSTS_AnswersDecideResults(t *testing.T) {
	code := func(c string) error { return &smithy.GenericAPIError{Code: c, Message: "said so"} }
	for _, tc := range []struct {
		err  error
		want Result
	}{
		{nil, Yes},
		{code("AccessDenied"), Unknown},
		{code("ValidationError"), Unknown},
		{code("InvalidClientTokenId"), Unknown},
		{code("InvalidAction"), No},
		{code("NotImplemented"), No},
		{code("MethodNotAllowed"), No},
		{errors.New("connection reset"), Unknown},
	} {
		if got := rowOfAnswer(Optional("x", "x"), tc.err, "asking"); got.Result != tc.want || (tc.err != nil) != (got.Why != "") {
			t.Errorf("%v: %+v", tc.err, got)
		}
	}
}

func TestCleanUp_KeepsOtherObjects(t *testing.T) {
	var removed []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodDelete:
			removed = append(removed, r.URL.Path)
			w.WriteHeader(http.StatusNoContent)
		case r.URL.Query().Has("versions"):
			w.WriteHeader(http.StatusNotImplemented)
		default: // the listing of a service that does not look at the prefix
			_, _ = w.Write([]byte(`<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>precious</Key></Contents></ListBucketResult>`))
		}
	}))
	defer server.Close()
	client := s3.New(s3.Options{
		BaseEndpoint: &server.URL, Region: "x", UsePathStyle: true, Credentials: awscredentials.NewStaticCredentialsProvider("a", "b", ""), Retryer: aws.NopRetryer{},
	})
	r := &run{client: client, info: backend.BucketInfo{Name: "bucket"}, prefix: ".s3-csi/check/x/"}
	if err := r.removeBelow(t.Context()); err == nil || len(removed) > 0 {
		t.Errorf("%v, removed %q", err, removed)
	}
}
