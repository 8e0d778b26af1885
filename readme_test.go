package pgsplit_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	osexec "os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// pages are those whose blocks are code and commands that work.
var pages = []string{"README.md", "CONTRIBUTING.md", "docs/operations.md", "docs/testing.md"}

// A block is a fenced or indented piece of a page.
type block struct {
	page     string
	line     int    // of its fence or its first line, from 1
	language string // of the fence; empty if it is indented
	lines    []string
}

func (b block) String() string {
	return b.page + ":" + strconv.Itoa(b.line) + ":\n\t" + strings.Join(b.lines, "\n\t")
}

// blocksOf reads all pages.
func blocksOf(t *testing.T) []block {
	t.Helper()
	var blocks []block
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		blocks = append(blocks, parseBlocks(page, string(text))...)
	}
	return blocks
}

func parseBlocks(page, text string) []block {
	var blocks []block
	var b *block
	end := func() {
		if b != nil {
			blocks = append(blocks, *b)
			b = nil
		}
	}
	for i, line := range strings.Split(text, "\n") {
		fence, fenced := strings.CutPrefix(line, "```")
		switch {
		case fenced && b != nil:
			end()
		case fenced:
			b = &block{page: page, line: i + 1, language: fence}
		case b != nil && b.language != "":
			b.lines = append(b.lines, line)
		case strings.HasPrefix(line, "    "):
			if b == nil {
				b = &block{page: page, line: i + 1}
			}
			b.lines = append(b.lines, line[4:])
		default:
			end()
		}
	}
	end()
	return blocks
}

// A function is one of a test file: its lines, as normal has them, and what its file imports.
type function struct {
	lines   []string
	imports map[string]bool
}

// testFunctions are those that run: tests, examples with an output, and what they call, which staticcheck vouches for.
func testFunctions(t *testing.T) []function {
	t.Helper()
	var functions []function
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, text, parser.ParseComments)
		if err != nil {
			return err
		}
		imports := map[string]bool{}
		for _, i := range file.Imports {
			imports[strings.TrimSpace(string(text[files.Position(i.Pos()).Offset:files.Position(i.End()).Offset]))] = true
		}
		for _, declaration := range file.Decls {
			f, ok := declaration.(*ast.FuncDecl)
			if !ok {
				continue
			}
			source := string(text[files.Position(f.Pos()).Offset:files.Position(f.End()).Offset])
			if strings.HasPrefix(f.Name.Name, "Example") && !strings.Contains(source, "// Output:") {
				continue
			}
			functions = append(functions, function{slices.DeleteFunc(normal(strings.Split(source, "\n")), isEmpty), imports})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return functions
}

// normal is lines without indentation, alignment and comments.
func normal(lines []string) []string {
	var out []string
	for _, line := range lines {
		line, _, _ = strings.Cut(" "+strings.Join(strings.Fields(line), " ")+" ", " // ")
		out = append(out, strings.TrimSpace(line))
	}
	return out
}

func isEmpty(line string) bool { return line == "" }

// has tells whether f has the paragraphs of a block, each as it stands, in the block's order: an empty line on a page may
// stand for whatever the test has there.
func (f function) has(paragraphs [][]string) bool {
	rest := f.lines
	for _, paragraph := range paragraphs {
		at := 0
		for ; ; at++ {
			if at+len(paragraph) > len(rest) {
				return false
			}
			if slices.Equal(rest[at:at+len(paragraph)], paragraph) {
				break
			}
		}
		rest = rest[at+len(paragraph):]
	}
	return true
}

// goBlock takes a block apart: what it imports, and its paragraphs without what only a program needs around them.
func goBlock(b block) (imports []string, paragraphs [][]string) {
	var paragraph []string
	end := func() {
		if len(paragraph) > 0 {
			paragraphs = append(paragraphs, paragraph)
			paragraph = nil
		}
	}
	program, importing := slices.Contains(b.lines, "package main"), false
	for _, line := range normal(b.lines) {
		single, imported := strings.CutPrefix(line, "import ")
		switch {
		case line == "import (":
			importing = true
		case importing && line == ")":
			importing = false
		case importing && line != "":
			imports = append(imports, line)
		case imported:
			imports = append(imports, single)
		case line == "" && !importing, line == "package main", line == "func main() {":
			end()
		case line == "":
		default:
			paragraph = append(paragraph, line)
		}
	}
	if program { // its last line closes main
		paragraph = paragraph[:len(paragraph)-1]
	}
	end()
	return imports, paragraphs
}

// Every piece of Go on the pages is part of a test or example.
func TestTheGoOnThePagesRuns(t *testing.T) {
	functions := testFunctions(t)
	found := 0
	for _, b := range blocksOf(t) {
		if b.language != "go" {
			continue
		}
		imports, paragraphs := goBlock(b)
		ok := slices.ContainsFunc(functions, func(f function) bool {
			imported := func(i string) bool { return f.imports[i] }
			return f.has(paragraphs) && !slices.ContainsFunc(imports, func(i string) bool { return !imported(i) })
		})
		if !ok {
			t.Errorf("in no test or example, with its imports: %s", b)
		}
		found++
	}
	if found < 10 {
		t.Errorf("only %d blocks of Go were found", found)
	}
}

// A command is a line of a shell on the pages.
type command struct {
	// stage is a line of a file of CI's that runs it.
	file, stage string
	// trial is what the test runs in its place, in a checkout with a DATABASE_URL; empty if it runs nothing.
	trial string
}

var commands = map[string]command{
	"make demo":                   {"scripts/test", "side_by_side scripts/fuzz demo", "make -n demo"},
	"make test":                   {".ci/run", "make test", "make -n test"},
	"make test-short":             {"scripts/test", "side_by_side scripts/lint short", "make -n test-short"},
	"make soak SECONDS=600":       {".ci/run", "make soak SECONDS=60 SEED=7", "make -n soak SECONDS=600"},
	"make soak SECONDS=60 SEED=7": {".ci/run", "make soak SECONDS=60 SEED=7", "make -n soak SECONDS=60 SEED=7"},
	"go test -race -run 'TestAFloor' .": {
		"scripts/test", `side_by_side "with_race ." others`,
		"grep -q '^func TestAFloor' *_test.go",
	},
	// The module itself, from a checkout: what is published is what a version's tag has. A replace would forbid @latest.
	"go get github.com/pgsplit/pgsplit": {"scripts/lint", "  go vet ./...", "go list github.com/pgsplit/pgsplit"},
	"go install github.com/pgsplit/pgsplit/cmd/pgsplit@latest": {
		"scripts/lint", `  GOBIN=$tmp go install -buildvcs=false ./cmd/pgsplit`, "! grep -q ^replace go.mod",
	},
	`pgsplit check "$DATABASE_URL" "$DATABASE_RO_URL"`: {trial: `pgsplit check "$DATABASE_URL" "$DATABASE_RO_URL"`},
	`pgsplit watch "$DATABASE_URL" "$DATABASE_RO_URL"`: {trial: `pgsplit watch -once "$DATABASE_URL" "$DATABASE_RO_URL"`},
}

// Every command on the pages is run by CI, or here.
func TestTheCommandsOnThePagesRun(t *testing.T) {
	cluster := pgsplittest.Start(t)
	if err := cluster.CatchUp(patient(t)); err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	if out, err := osexec.Command("go", "build", "-buildvcs=false", "-o", bin, "./cmd/pgsplit").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	seen := map[string]bool{}
	for _, b := range blocksOf(t) {
		if b.language != "" && b.language != "sh" || isDSN(b) {
			continue
		}
		for _, line := range b.lines {
			line, _, _ = strings.Cut(line, " #")
			line = strings.TrimSpace(line)
			c, ok := commands[line]
			if !ok {
				t.Errorf("nothing is known to run %q: %s", line, b)
				continue
			}
			if seen[line] {
				continue
			}
			seen[line] = true
			if c.file != "" {
				text, err := os.ReadFile(c.file)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Contains(strings.Split(string(text), "\n"), c.stage) {
					t.Errorf("%s: %s has no line %q", line, c.file, c.stage)
				}
			}
			trial := osexec.Command("sh", "-c", c.trial)
			trial.Env = append(os.Environ(), "DATABASE_URL="+with(cluster.Primary.URI(), "replica_timeout=20s"),
				"DATABASE_RO_URL="+cluster.Replicas[0].URI(), "PATH="+bin+":"+os.Getenv("PATH"))
			if out, err := trial.CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", c.trial, err, out)
			}
		}
	}
	for line := range maps.Keys(commands) {
		if !seen[line] {
			t.Errorf("%s is on no page any more", line)
		}
	}
}

// isDSN tells whether a block without a language shows DSNs.
func isDSN(b block) bool {
	return b.language == "" && !slices.ContainsFunc(b.lines, func(line string) bool {
		return !strings.HasPrefix(line, "postgres://") && !strings.HasPrefix(line, "host=")
	})
}

// Every DSN on the pages leads to the servers that it names, however it is written down.
func TestTheDSNsOnThePagesAreUnderstood(t *testing.T) {
	found := 0
	for _, b := range blocksOf(t) {
		var dsns []string
		switch {
		case isDSN(b):
			dsns = b.lines
		case b.language == "dotenv":
			dsns = []string{fromEnvFile(t, b)}
		case b.language == "yaml":
			dsns = []string{fromYAML(b)}
		}
		for _, dsn := range dsns {
			config, err := pgsplit.ParseDSN(dsn)
			if err != nil {
				t.Errorf("%v: %s", err, b)
				continue
			}
			if primary := config.Primary.ConnConfig.Host; !strings.HasPrefix(primary, "db1") || len(config.Replicas) == 0 {
				t.Errorf("primary %q and %d replicas, want db1 and some: %s", primary, len(config.Replicas), b)
			}
			found++
		}
	}
	if found < 4 {
		t.Errorf("only %d DSNs were found", found)
	}
}

// fromEnvFile has a shell read the block.
func fromEnvFile(t *testing.T, b block) string {
	t.Helper()
	out, err := osexec.Command("sh", "-c", strings.Join(b.lines, "\n")+"\n"+`printf '%s %s' "$DATABASE_URL" "$DATABASE_RO_URL"`).Output()
	if err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	return string(out)
}

// fromYAML reads the strings after "value:", and those on further lines after "value: |".
func fromYAML(b block) string {
	var values []string
	literal := -1 // how far the key of a literal is indented; -1 outside of one
	for _, line := range b.lines {
		indent := len(line) - len(strings.TrimLeft(line, " "))
		if literal >= 0 && indent > literal {
			values = append(values, strings.TrimSpace(line))
			continue
		}
		literal = -1
		value, ok := strings.CutPrefix(strings.TrimSpace(line), "value: ")
		switch {
		case ok && value == "|":
			literal = indent
		case ok:
			values = append(values, value)
		}
	}
	return strings.Join(values, "\n")
}
