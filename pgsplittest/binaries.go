package pgsplittest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// ErrNoBinaries says that no PostgreSQL server is installed where [FindBinaries] looks, and how to get one.
var ErrNoBinaries = errors.New("pgsplittest: no PostgreSQL server binaries (initdb and postgres): " +
	"`apt-get install postgresql`, `brew install postgresql`, run `make test` in a checkout of pgsplit, which fetches them, " +
	"or set PGSPLIT_PG_BIN to the folder that holds them")

// FindBinaries returns the folder of the first initdb and postgres found in
//
//   - $PGSPLIT_PG_BIN, and nowhere else when it is set
//   - the folder that `pg_config --bindir` names
//   - the folder of the postgres in $PATH
//   - the folders that packages install to, newest version first: /usr/lib/postgresql/*/bin, /usr/pgsql-*/bin,
//     /opt/homebrew/opt/postgresql*/bin, /usr/local/opt/postgresql*/bin
//   - pgsplit/postgresql/*/bin in the user's cache folder
//
// The error is [ErrNoBinaries] or wraps it.
func FindBinaries() (dir string, err error) {
	if dir := os.Getenv("PGSPLIT_PG_BIN"); dir != "" {
		if !hasBinaries(dir) {
			return "", fmt.Errorf("pgsplittest: PGSPLIT_PG_BIN=%s holds no initdb and postgres: %w", dir, ErrNoBinaries)
		}
		return dir, nil
	}
	for _, dir := range candidateFolders() {
		if hasBinaries(dir) {
			return dir, nil
		}
	}
	return "", ErrNoBinaries
}

func candidateFolders() []string {
	var dirs []string
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		// Behind a link lie the other binaries.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			path = real
		}
		dirs = append(dirs, filepath.Dir(path))
	}
	patterns := []string{
		"/usr/lib/postgresql/*/bin",
		"/usr/pgsql-*/bin",
		"/opt/homebrew/opt/postgresql*/bin",
		"/usr/local/opt/postgresql*/bin",
	}
	if cache, err := os.UserCacheDir(); err == nil {
		patterns = append(patterns, filepath.Join(cache, "pgsplit", "postgresql", "*", "bin"))
	}
	for _, pattern := range patterns {
		matches, _ := filepath.Glob(pattern) // fails only on a bad pattern
		sortNewestFirst(matches)
		dirs = append(dirs, matches...)
	}
	return dirs
}

// sortNewestFirst sorts folders by the version in their names: 18 before 9.6, and both before none.
func sortNewestFirst(dirs []string) {
	slices.SortStableFunc(dirs, func(a, b string) int { return folderVersion(b) - folderVersion(a) })
}

// folderVersion returns the major version in the name of a folder's parent: 16 for /usr/lib/postgresql/16/bin and for
// /opt/homebrew/opt/postgresql@16/bin, 0 where there is none.
func folderVersion(dir string) int {
	return leadingNumber(strings.TrimLeft(filepath.Base(filepath.Dir(dir)), "abcdefghijklmnopqrstuvwxyz-@"))
}

// leadingNumber returns the number that s begins with, or 0.
func leadingNumber(s string) int {
	end := strings.IndexFunc(s, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(s)
	}
	n, _ := strconv.Atoi(s[:end])
	return n
}

func hasBinaries(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.IsDir() || info.Mode().Perm()&0o111 == 0 {
			return false
		}
	}
	return true
}

// binaries is one installed PostgreSQL.
type binaries struct {
	dir     string
	version string // what `postgres --version` prints
	major   int
	owner   *owner // who runs them; nil: this process's own user
}

// opened keeps the binaries that were found to run, by folder, for the next cluster of this process.
var opened sync.Map

// openBinaries checks that the servers in dir, or where FindBinaries finds them, can be run.
func openBinaries(ctx context.Context, dir string) (*binaries, error) {
	if dir == "" {
		found, err := FindBinaries()
		if err != nil {
			return nil, err
		}
		dir = found
	} else if !hasBinaries(dir) {
		return nil, fmt.Errorf("pgsplittest: %s holds no initdb and postgres: %w", dir, ErrNoBinaries)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("pgsplittest: folder of the binaries: %w", err)
	}
	if b, ok := opened.Load(dir); ok {
		return b.(*binaries), nil
	}
	own, err := serverOwner()
	if err != nil {
		return nil, err
	}
	b := &binaries{dir: dir, owner: own}
	out, err := b.command(ctx, "/", "postgres", "--version").CombinedOutput()
	if err != nil {
		if own != nil {
			return nil, fmt.Errorf("pgsplittest: user %s, who runs the servers for root, cannot run %s (are it and its parent folders open to all?): %w: %s",
				own.name, filepath.Join(dir, "postgres"), err, out)
		}
		return nil, fmt.Errorf("pgsplittest: %s --version: %w: %s", filepath.Join(dir, "postgres"), err, out)
	}
	b.version = strings.TrimSpace(string(out))
	// "postgres (PostgreSQL) 15.18 (Debian ...)", "postgres (PostgreSQL) 19rc1"
	if _, after, ok := strings.Cut(b.version, "(PostgreSQL) "); ok {
		b.major = leadingNumber(after)
	}
	if b.major < 13 {
		return nil, fmt.Errorf("pgsplittest: %q in %s: PostgreSQL 13 or later is needed", b.version, dir)
	}
	opened.Store(dir, b)
	return b, nil
}

// command prepares one of the binaries to run in the folder dir as the servers' owner.
func (b *binaries) command(ctx context.Context, dir, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(b.dir, name), args...)
	cmd.Dir = dir // the current folder may be closed to the owner
	for _, v := range os.Environ() {
		// PGOPTIONS, PGSSLMODE and their like would reach the libpq of a replica's walreceiver.
		if !strings.HasPrefix(v, "PG") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	runAs(cmd, b.owner)
	return cmd
}
