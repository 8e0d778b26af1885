package pgsplittest

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
)

// F18: most of the time that a new server takes is initdb's. It runs once per installed version; its result is kept in
// the user's cache folder, and every server begins as a copy. It is kept as one archive file, because a file appears
// whole (by rename), is read whole even when somebody deletes it meanwhile, and cannot lose a part to a cleaner of old
// files as a folder can.

// initdbArguments make the template. What changes here changes the template's name.
var initdbArguments = []string{"--username=postgres", "--auth=trust", "--no-sync", "--no-locale", "--encoding=UTF8"}

// templateMu lets one initdb of this process run at a time. Two processes may do the work twice, to the same end.
var templateMu sync.Mutex

// template returns the path of an archive of a fresh data folder. scratch is a folder that the servers' owner can write
// to; without a cache folder the archive itself is left there.
func (b *binaries) template(ctx context.Context, scratch string) (string, error) {
	templateMu.Lock()
	defer templateMu.Unlock()
	name, err := b.templateName()
	if err != nil {
		return "", err
	}
	folder := scratch
	if cache, err := os.UserCacheDir(); err == nil {
		cache = filepath.Join(cache, "pgsplit", "templates")
		if os.MkdirAll(cache, 0o700) == nil {
			folder = cache
		}
	}
	archive := filepath.Join(folder, name)
	if _, err := os.Stat(archive); err == nil {
		return archive, nil
	}
	data := filepath.Join(scratch, "template")
	defer os.RemoveAll(data)
	cmd := b.command(ctx, scratch, "initdb", append([]string{"--pgdata=" + data}, initdbArguments...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("pgsplittest: initdb: %w: %s", err, out)
	}
	if err := pack(data, archive); err != nil {
		return "", fmt.Errorf("pgsplittest: keep a template of the data folder: %w", err)
	}
	return archive, nil
}

// templateName tells apart whatever initdb's result depends on.
func (b *binaries) templateName() (string, error) {
	info, err := os.Stat(filepath.Join(b.dir, "postgres"))
	if err != nil {
		return "", fmt.Errorf("pgsplittest: %w", err)
	}
	sum := sha256.Sum256(fmt.Append(nil, b.dir, b.version, info.Size(), info.ModTime().UnixNano(), initdbArguments, lastEntry))
	return fmt.Sprintf("postgresql-%d-%x.tar", b.major, sum[:8]), nil
}

// lastEntry ends an archive. A tar file that was cut off between two files looks complete otherwise.
const lastEntry = "end of template"

// pack writes the files below folder into a new archive, which appears when it is complete.
func pack(folder, archive string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(archive), "new-*")
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	w := tar.NewWriter(f)
	if err := w.AddFS(os.DirFS(folder)); err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Name: lastEntry, Typeflag: tar.TypeReg, Mode: 0o600}); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	// Synced, so that a power failure cannot leave an empty archive under the final name.
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), archive)
}

// errNotAnArchive says that an archive is not what pack wrote, and should be made anew.
var errNotAnArchive = errors.New("template is damaged")

var zeroes [64 << 10]byte

// unpack makes the new folder from an archive, owned by own.
func unpack(archive, folder string, own *owner) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := newFolder(folder, own); err != nil {
		return err
	}
	r := tar.NewReader(f)
	block := make([]byte, len(zeroes))
	for {
		header, err := r.Next()
		if err == nil && header.Name == lastEntry {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errNotAnArchive, err)
		}
		path := filepath.Join(folder, header.Name)
		switch {
		case !filepath.IsLocal(header.Name):
			err = fmt.Errorf("%w: %q is outside of it", errNotAnArchive, header.Name)
		case path == folder:
			continue
		case header.Typeflag == tar.TypeDir:
			err = newFolder(path, own)
		case header.Typeflag == tar.TypeReg:
			err = unpackFile(path, own, r, block)
		default:
			err = fmt.Errorf("%w: %s is neither file nor folder", errNotAnArchive, header.Name)
		}
		if err != nil {
			return err
		}
	}
}

// unpackFile makes a new file with what r holds. Blocks of zeroes, which half of a new server consists of, become holes.
func unpackFile(path string, own *owner, r io.Reader, block []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	var size, written int64
	for {
		n, err := io.ReadFull(r, block)
		if n > 0 && !bytes.Equal(block[:n], zeroes[:n]) {
			if _, err := f.WriteAt(block[:n], size); err != nil {
				return err
			}
			written = size + int64(n)
		}
		size += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("%w: %s: %w", errNotAnArchive, path, err)
		}
	}
	if written < size {
		if err := f.Truncate(size); err != nil {
			return err
		}
	}
	if err := giveTo(own, path); err != nil {
		return err
	}
	return f.Close()
}

// newFolder makes a folder that only own can enter.
func newFolder(path string, own *owner) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	return giveTo(own, path)
}
