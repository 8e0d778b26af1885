package pgsplittest

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestAFolderComesOutOfItsArchiveAsItWentIn(t *testing.T) {
	zeroes := make([]byte, 100_000)
	files := map[string][]byte{
		"empty":                 nil,
		"zeroes":                zeroes,
		"text":                  []byte("text"),
		"ends in zeroes":        append([]byte("a"), zeroes...),
		"has zeroes inside":     append(append([]byte("a"), zeroes...), 'b'),
		"large/er than a block": bytes.Repeat([]byte("0123456789"), 300_000),
	}
	folder, archive, out := t.TempDir(), filepath.Join(t.TempDir(), "archive"), filepath.Join(t.TempDir(), "out")
	must(t, os.MkdirAll(filepath.Join(folder, "large", "empty"), 0o700))
	for name, content := range files {
		must(t, os.WriteFile(filepath.Join(folder, name), content, 0o600))
	}
	must(t, pack(folder, archive))
	must(t, unpack(archive, out, nil))
	for name, content := range files {
		if got, err := os.ReadFile(filepath.Join(out, name)); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s: %d bytes instead of %d, %v", name, len(got), len(content), err)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(out, "large")); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
	if info, err := os.Stat(archive); err != nil || info.Size() > 3_200_000 {
		t.Errorf("the archive takes %d bytes, %v", info.Size(), err)
	}
}

// What other systems do in place of a system call.
func TestBytesOfAFileAreAppendedToAnother(t *testing.T) {
	from, to := filepath.Join(t.TempDir(), "from"), filepath.Join(t.TempDir(), "to")
	must(t, os.WriteFile(from, []byte("0123456789"), 0o600))
	for name, copied := range map[string]func(to, from *os.File, offset, n int64) error{"copyRange": copyRange, "copyBytes": copyBytes} {
		in, err := os.Open(from)
		must(t, err)
		out, err := os.Create(to)
		must(t, err)
		must(t, copied(out, in, 2, 3))
		must(t, copied(out, in, 0, 1))
		if err := copied(out, in, 8, 3); err == nil {
			t.Errorf("%s: more than there is was copied", name)
		}
		must(t, out.Close())
		must(t, in.Close())
		if got, err := os.ReadFile(to); err != nil || string(got) != "234089" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// A cache folder may be there and take nothing: as in a container whose home is read only.
func TestAClusterStartsWithACacheFolderThatTakesNothing(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	must(t, os.Mkdir(filepath.Join(cache, "pgsplit"), 0o700))
	must(t, os.Symlink("/proc", filepath.Join(cache, "pgsplit", "templates"))) // not even from root
	if err := Start(t, Replicas(0)).Primary.Exec(t.Context(), "select 1"); err != nil {
		t.Error(err)
	}
}
