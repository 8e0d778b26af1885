package pgsplittest

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// fakeBinaries makes a folder with files of these names that can be executed.
func fakeBinaries(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"), 0o755))
	}
	return dir
}

func TestTheEnvironmentNamesTheBinariesAndNothingElseIsTried(t *testing.T) {
	good := fakeBinaries(t, "initdb", "postgres")
	t.Setenv("PGSPLIT_PG_BIN", good)
	if dir, err := FindBinaries(); err != nil || dir != good {
		t.Errorf("FindBinaries() = %q, %v", dir, err)
	}
	t.Setenv("PGSPLIT_PG_BIN", fakeBinaries(t, "postgres"))
	if dir, err := FindBinaries(); !errors.Is(err, ErrNoBinaries) {
		t.Errorf("without initdb, FindBinaries() = %q, %v", dir, err)
	}
}

func TestBinariesAreFoundThroughPath(t *testing.T) {
	real := fakeBinaries(t, "initdb", "postgres")
	links := t.TempDir()
	must(t, os.Symlink(filepath.Join(real, "postgres"), filepath.Join(links, "postgres")))
	t.Setenv("PGSPLIT_PG_BIN", "")
	t.Setenv("PATH", links)
	real, err := filepath.EvalSymlinks(real)
	must(t, err)
	if dir, err := FindBinaries(); err != nil || dir != real {
		t.Errorf("FindBinaries() = %q, %v, want %q", dir, err, real)
	}
}

func TestPgConfigWithoutAServerIsPassedOver(t *testing.T) {
	clientOnly := fakeBinaries(t, "psql")
	path := fakeBinaries(t, "initdb", "postgres")
	script := "#!/bin/sh\necho " + clientOnly + "\n"
	must(t, os.WriteFile(filepath.Join(path, "pg_config"), []byte(script), 0o755))
	t.Setenv("PGSPLIT_PG_BIN", "")
	t.Setenv("PATH", path)
	path, err := filepath.EvalSymlinks(path)
	must(t, err)
	if dir, err := FindBinaries(); err != nil || dir != path {
		t.Errorf("FindBinaries() = %q, %v, want %q", dir, err, path)
	}
}

func TestAFolderWithoutBinariesIsAnError(t *testing.T) {
	c, err := StartCluster(t.Context(), BinDir(t.TempDir()))
	if !errors.Is(err, ErrNoBinaries) {
		t.Errorf("StartCluster = %v, %v", c, err)
	}
}

func TestFoldersAreSortedByVersionNewestFirst(t *testing.T) {
	dirs := []string{
		"/usr/lib/postgresql/9.6/bin", "/usr/local/opt/postgresql/bin", "/usr/lib/postgresql/17/bin",
		"/opt/homebrew/opt/postgresql@18/bin", "/usr/pgsql-16/bin", "/cache/pgsplit/postgresql/19.1/bin",
	}
	sortNewestFirst(dirs)
	want := []string{
		"/cache/pgsplit/postgresql/19.1/bin", "/opt/homebrew/opt/postgresql@18/bin", "/usr/lib/postgresql/17/bin",
		"/usr/pgsql-16/bin", "/usr/lib/postgresql/9.6/bin", "/usr/local/opt/postgresql/bin",
	}
	if !slices.Equal(dirs, want) {
		t.Errorf("sorted: %v", dirs)
	}
}
