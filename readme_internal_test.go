package pgsplit

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A table of the README: its cells, the head first.
type table [][]string

// column is what is in backquotes in a column, but in the head.
func (t table) column(i int) []string {
	var names []string
	for _, row := range t[1:] {
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[i], -1) {
			names = append(names, m[1])
		}
	}
	return names
}

// names are those of its first column, without arguments.
func (t table) names() []string {
	var names []string
	for _, name := range t.column(0) {
		name, _, _ = strings.Cut(name, "(")
		names = append(names, name)
	}
	return names
}

// readTables reads the README's tables by their heads' first cells.
func readTables(t *testing.T) map[string]table {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	tables := map[string]table{}
	var current table
	for _, line := range strings.Split(string(text)+"\n", "\n") {
		if strings.HasPrefix(line, "| ") {
			if cells := strings.Split(strings.Trim(line, "| "), " | "); cells[0] != "---" {
				current = append(current, cells)
			}
			continue
		}
		if current != nil {
			tables[strings.ReplaceAll(strings.Join(current[0], ", "), "`", "")] = current
		}
		current = nil
	}
	return tables
}

func sameNames(t *testing.T, what string, got, want []string) {
	t.Helper()
	got, want = slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))
	if slices.Equal(got, want) {
		return
	}
	for _, name := range want {
		if !slices.Contains(got, name) {
			t.Errorf("%s: the README lacks %s", what, name)
		}
	}
	for i, name := range got {
		if !slices.Contains(want, name) {
			t.Errorf("%s: the README has %s, which is not there", what, name)
		}
		if i > 0 && got[i-1] == name {
			t.Errorf("%s: the README has %s twice", what, name)
		}
	}
}

// declarationsIn calls f for each declaration of a folder's package, tests left out.
func declarationsIn(t *testing.T, folder string, f func(ast.Decl)) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatal(err, "no files in", folder)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			f(d)
		}
	}
}

// exported are the exported functions of a folder's package for which is says so.
func exported(t *testing.T, folder string, is func(*ast.FuncDecl) bool) []string {
	t.Helper()
	var names []string
	declarationsIn(t, folder, func(d ast.Decl) {
		if f, ok := d.(*ast.FuncDecl); ok && f.Name.IsExported() && is(f) {
			names = append(names, f.Name.Name)
		}
	})
	return names
}

// resultIs says whether a function, no method, has one result, of a type of its package.
func resultIs(typ string) func(*ast.FuncDecl) bool {
	return func(f *ast.FuncDecl) bool {
		if f.Recv != nil || f.Type.Results.NumFields() != 1 {
			return false
		}
		name, ok := f.Type.Results.List[0].Type.(*ast.Ident)
		return ok && name.Name == typ
	}
}

// methodOf says whether a function is a method of *typ.
func methodOf(typ string) func(*ast.FuncDecl) bool {
	return func(f *ast.FuncDecl) bool {
		if f.Recv == nil {
			return false
		}
		pointer, ok := f.Recv.List[0].Type.(*ast.StarExpr)
		if !ok {
			return false
		}
		name, ok := pointer.X.(*ast.Ident)
		return ok && name.Name == typ
	}
}

// fieldsOf are the exported fields of a struct's type but some.
func fieldsOf(v any, but ...string) []string {
	var names []string
	for _, f := range reflect.VisibleFields(reflect.TypeOf(v)) {
		if f.IsExported() && !slices.Contains(but, f.Name) {
			names = append(names, f.Name)
		}
	}
	return names
}

// The README's tables have what the code has.
func TestTheTablesOfTheReadmeAreComplete(t *testing.T) {
	tables := readTables(t)
	get := func(head string) table {
		tab, ok := tables[head]
		if !ok {
			t.Fatalf("no table with the head %q", head)
		}
		return tab
	}

	dsn := get("parameter, default, meaning")
	sameNames(t, "DSN parameters", dsn.names(), append(ourNames(), "name", "label", "weight", "pool_*"))
	for _, row := range dsn[1:] {
		documentedDefault(t, row)
	}

	sameNames(t, "reasons", get("reason, server, because").names(), reasonNames[:])
	sameNames(t, "states", get("state, meaning").names(), stateNames[:])

	var errs []string
	declarationsIn(t, ".", func(d ast.Decl) {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.VAR {
			return
		}
		for _, s := range g.Specs {
			for _, n := range s.(*ast.ValueSpec).Names {
				if strings.HasPrefix(n.Name, "Err") {
					errs = append(errs, n.Name)
				}
			}
		}
	})
	sameNames(t, "errors", get("error, meaning").names(), errs)

	sameNames(t, "options of ReadOnly", get("option of ReadOnly, meaning").names(), exported(t, ".", resultIs("ReadOption")))
	sameNames(t, "options of httpsession", get("option, default, meaning").names(), exported(t, "httpsession", resultIs("Option")))

	functions := exported(t, ".", func(f *ast.FuncDecl) bool { return f.Recv == nil })
	sessions := exported(t, ".", methodOf("Session"))
	var methods []string
	for _, name := range get("call, meaning").names() { // the last table of calls is that of sessions
		if m, ok := strings.CutPrefix(name, "s."); ok {
			methods = append(methods, m)
		} else if !slices.Contains(functions, name) && name != "Seal" && name != "Open" {
			t.Errorf("calls for sessions: the README has %s, which is not there", name)
		}
	}
	sameNames(t, "methods of Session", methods, sessions)

	stats := get("in Stats, meaning").names()
	for i, name := range stats {
		stats[i] = strings.TrimPrefix(name, "Servers[i].")
	}
	stats = slices.DeleteFunc(stats, func(name string) bool { return name == "Statements" })
	want := append(fieldsOf(Stats{}, "Servers"), fieldsOf(ServerStats{}, "Name", "Address", "Role", "Label", "Statements")...)
	sameNames(t, "Stats", stats, want)
	for _, row := range get("in Stats, meaning") {
		if row[0] == "`Errors`" {
			sameNames(t, "classes of errors", table{nil, row}.column(1), errorClassNames[:])
		}
	}
	sameNames(t, "findings of pgsplit check", get("finding, it means").names(), findings(t))
}

// documentedDefault checks that a parameter's default is what the README says.
func documentedDefault(t *testing.T, row []string) {
	t.Helper()
	defaults := strings.Split(strings.ReplaceAll(row[1], "`", ""), ", ")
	for i, name := range (table{nil, row}).names() {
		at := slices.IndexFunc(parameters, func(p parameter) bool { return p.name == name })
		if at < 0 || defaults[0] == "off" {
			continue
		}
		c := &Config{}
		if err := parameters[at].parse(c, defaults[i]); err != nil {
			t.Errorf("%s: the default %q: %v", name, defaults[i], err)
		} else if other := parameters[at].format(c); other != "" {
			t.Errorf("%s: %q is not its default", name, defaults[i])
		}
	}
}

// findings are the names that the command's diagnosis gives.
func findings(t *testing.T) []string {
	t.Helper()
	names := []string{}
	declarationsIn(t, "cmd/pgsplit", func(d ast.Decl) {
		ast.Inspect(d, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) < 2 {
				return true
			}
			// d.add(severity, name, ..), and finding{Name: ..}
			if f, ok := call.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "add" {
				if name, ok := call.Args[1].(*ast.BasicLit); ok && name.Kind == token.STRING {
					names = append(names, unquoted(t, name.Value))
				}
			}
			return true
		})
		ast.Inspect(d, func(n ast.Node) bool {
			pair, ok := n.(*ast.KeyValueExpr)
			if !ok {
				return true
			}
			key, ok := pair.Key.(*ast.Ident)
			value, isString := pair.Value.(*ast.BasicLit)
			if ok && isString && key.Name == "Name" {
				names = append(names, unquoted(t, value.Value))
			}
			return true
		})
	})
	slices.Sort(names)
	return slices.Compact(names)
}

func unquoted(t *testing.T, literal string) string {
	t.Helper()
	s, err := strconv.Unquote(literal)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The README names no test and no file that is not there.
func TestWhatTheReadmeNamesIsThere(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var tests strings.Builder
	err = filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			source, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			tests.Write(source)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(string(text), -1) {
		if !strings.Contains(tests.String(), "func "+name[1]+"(") {
			t.Errorf("there is no %s", name[1])
		}
	}
	for _, name := range regexp.MustCompile("`([\\w/]+\\.(?:go|md|json))`").FindAllStringSubmatch(string(text), -1) {
		if _, err := os.Stat(name[1]); err != nil {
			t.Error(err)
		}
	}
}

// Links between the pages lead to files and headings that are there.
func TestLinksOfThePagesLeadSomewhere(t *testing.T) {
	found := 0
	for _, page := range []string{"README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/architecture.md", "docs/operations.md", "docs/testing.md"} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range regexp.MustCompile(`\]\(([^():#]*)(#[^()]+)?\)`).FindAllStringSubmatch(string(text), -1) {
			found++
			target := page
			if link[1] != "" {
				target = filepath.Join(filepath.Dir(page), link[1])
			}
			there, err := os.ReadFile(target)
			if err != nil {
				t.Errorf("%s: %v", page, err)
			} else if link[2] != "" && !slices.Contains(anchors(string(there)), link[2]) {
				t.Errorf("%s: %s has no heading for %s", page, target, link[2])
			}
		}
	}
	if found < 5 {
		t.Errorf("only %d links were found", found)
	}
}

// anchors are those of the headings of a page, as GitHub makes them.
func anchors(text string) []string {
	var all []string
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		name := regexp.MustCompile(`[^\w -]`).ReplaceAllString(strings.ToLower(m[1]), "")
		all = append(all, "#"+strings.ReplaceAll(name, " ", "-"))
	}
	return all
}
