package fuseclients

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of the documentation")

const (
	pages = "../../../docs/*/*.md"
	begin = "<!-- clients: results of tests; make docs renders them -->\n"
	end   = "<!-- end of clients -->\n"
)

// One page of the documentation has the table of what is tested.
func TestDocs(t *testing.T) {
	table, err := Table()
	if err != nil {
		t.Fatal(err)
	}
	all, err := filepath.Glob(pages)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, page := range all {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		before, rest, ok := strings.Cut(string(text), begin)
		if !ok {
			continue
		}
		found++
		got, after, closed := strings.Cut(rest, end)
		switch {
		case !closed:
			t.Errorf("%s: the table has no end", page)
		case got == table:
		case !*update:
			t.Errorf("the table of %s is not that of the tests; run make docs", page)
		default:
			if err := os.WriteFile(page, []byte(before+begin+table+end+after), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	if found != 1 {
		t.Errorf("%d pages have the table, want one", found)
	}
}

// Each row of the table is run by exactly one test: a call of Get with its client, place and way.
func TestEachRowIsTested(t *testing.T) {
	constants := map[string]string{
		"BuiltIn": BuiltIn, "Declared": Declared, "InAPod": InAPod, "InKubernetes": InKubernetes, "Starter": Starter, "Path": Path, "Fusermount": Fusermount,
	}
	clients := map[string]string{"mountpoint": "mountpoint-s3", "rclone": "rclone"} // of package node
	tested := map[[3]string]int{}
	for _, dir := range []string{"../../node", "../../podclient", "../../e2e"} {
		files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Fatal("no tests: ", err)
		}
		for _, file := range files {
			tree, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(tree, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || len(call.Args) != 4 {
					return true
				}
				if f, ok := call.Fun.(*ast.SelectorExpr); !ok || f.Sel.Name != "Get" || !isPackage(f.X) {
					return true
				}
				var row [3]string
				for i, arg := range call.Args[1:] {
					switch arg := arg.(type) {
					case *ast.BasicLit:
						row[i], _ = strconv.Unquote(arg.Value)
					case *ast.Ident:
						row[i] = clients[arg.Name]
					case *ast.SelectorExpr:
						row[i] = constants[arg.Sel.Name]
					}
				}
				tested[row]++
				return true
			})
		}
	}
	for _, c := range Cases() {
		if n := tested[[3]string{c.Client, c.Place, c.Way}]; n != 1 {
			t.Errorf("%s, %s, %s: %d tests", c.Client, c.Place, c.Way, n)
		}
	}
}

// Nothing is recorded of a case that no test runs.
func TestEachResultIsOfARow(t *testing.T) {
	files, err := os.ReadDir("results")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !slices.ContainsFunc(Cases(), func(c Case) bool { return c.file() == f.Name() }) {
			t.Errorf("%s is of no row of the table", f.Name())
		}
	}
}

func isPackage(x ast.Expr) bool {
	name, ok := x.(*ast.Ident)
	return ok && name.Name == "fuseclients"
}
