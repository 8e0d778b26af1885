package pgsplit_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// docs/architecture.md says what is where: every file of the driver, and none that is gone.
func TestTheArchitectureNamesEveryFile(t *testing.T) {
	text, err := os.ReadFile("docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("`([\\w/]+(?:\\.go|/))`").FindAllStringSubmatch(string(text), -1) {
		named[m[1]] = true
		if _, err := os.Stat(m[1]); err != nil {
			t.Errorf("it names %s, which is not there", m[1])
		}
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if !strings.HasSuffix(file, "_test.go") && !named[file] {
			t.Errorf("it does not name %s", file)
		}
	}
}

// Comments name facts about PostgreSQL by number: each is on its page.
func TestEveryNumberedFactIsListed(t *testing.T) {
	text, err := os.ReadFile("docs/postgres.md")
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(".", func(path string, _ os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, fact := range regexp.MustCompile(`\bF[1-9][0-9]?\b`).FindAllString(string(source), -1) {
			if !strings.Contains(string(text), "\n| "+fact+" |") {
				t.Errorf("%s names %s, which is not listed", path, fact)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
