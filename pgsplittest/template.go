package pgsplittest

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
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
// to; without a cache folder that takes the archive it is left there.
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
	err = pack(data, archive)
	if err != nil && folder != scratch { // nobody may write there, or it is full
		archive = filepath.Join(scratch, name)
		err = pack(data, archive)
	}
	if err != nil {
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
const lastEntry = "end of template, files without the zeroes at their end"

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
	if err := packFiles(w, os.DirFS(folder)); err != nil {
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

// sizeRecord is the size of a file that ends in zeroes, as those of WAL do: these are left out, and become a hole.
const sizeRecord = "PGSPLIT.size"

func packFiles(w *tar.Writer, files fs.FS) error {
	return fs.WalkDir(files, ".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil || path == ".":
			return err
		case entry.IsDir():
			return w.WriteHeader(&tar.Header{Name: path + "/", Typeflag: tar.TypeDir, Mode: 0o700})
		}
		content, err := fs.ReadFile(files, path)
		if err != nil {
			return err
		}
		header := &tar.Header{Name: path, Typeflag: tar.TypeReg, Mode: 0o600}
		size := len(content)
		if content = bytes.TrimRight(content, "\x00"); len(content) < size {
			header.PAXRecords = map[string]string{sizeRecord: strconv.Itoa(size)}
		}
		header.Size = int64(len(content))
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
}

// errNotAnArchive says that an archive is not what pack wrote, and should be made anew.
var errNotAnArchive = errors.New("template is damaged")

// file is a file or folder in an archive.
type file struct {
	name   string
	folder bool
	offset int64 // where the archive has its content
	stored int64 // how much of that is there
	size   int64
}

// unpack makes the new folder from an archive, owned by own.
func unpack(archive, folder string, own *owner) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	files, err := contents(f)
	if err != nil {
		return err
	}
	if err := newFolder(folder, own); err != nil {
		return err
	}
	for _, file := range files {
		path := filepath.Join(folder, file.name)
		if file.folder {
			err = newFolder(path, own)
		} else {
			err = unpackFile(path, own, f, file)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// read are the contents of the archives that this process has read: it takes as long as it takes to copy them.
var read struct {
	mu       sync.Mutex
	archives []listing // guarded by mu
}

type listing struct {
	of    os.FileInfo
	files []file
}

// contents lists what is in an archive.
func contents(archive *os.File) ([]file, error) {
	info, err := archive.Stat()
	if err != nil {
		return nil, err
	}
	read.mu.Lock()
	defer read.mu.Unlock()
	for _, known := range read.archives {
		if os.SameFile(known.of, info) && known.of.Size() == info.Size() && known.of.ModTime().Equal(info.ModTime()) {
			return known.files, nil
		}
	}
	files, err := list(archive)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotAnArchive, err)
	}
	read.archives = append(read.archives, listing{info, files})
	return files, nil
}

func list(archive *os.File) (files []file, err error) {
	r := tar.NewReader(archive)
	for {
		header, err := r.Next()
		if err != nil {
			return nil, err
		}
		if header.Name == lastEntry {
			return files, nil
		}
		f := file{name: header.Name, folder: header.Typeflag == tar.TypeDir, stored: header.Size, size: header.Size}
		if !filepath.IsLocal(f.name) || !f.folder && header.Typeflag != tar.TypeReg {
			return nil, fmt.Errorf("%q is not what belongs there", f.name)
		}
		if text, ok := header.PAXRecords[sizeRecord]; ok {
			if f.size, err = strconv.ParseInt(text, 10, 64); err != nil || f.size < f.stored {
				return nil, fmt.Errorf("%s has a size of %q", f.name, text)
			}
		}
		if f.offset, err = archive.Seek(0, io.SeekCurrent); err != nil {
			return nil, err
		}
		files = append(files, f)
	}
}

func unpackFile(path string, own *owner, archive *os.File, file file) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := copyRange(f, archive, file.offset, file.stored); err != nil {
		return err
	}
	if file.stored < file.size {
		if err := f.Truncate(file.size); err != nil {
			return err
		}
	}
	if err := giveTo(own, path); err != nil {
		return err
	}
	return f.Close()
}

// copyBytes is copyRange where no system call does it.
func copyBytes(to, from *os.File, offset, n int64) error {
	copied, err := io.Copy(to, io.NewSectionReader(from, offset, n))
	if err == nil && copied < n {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// newFolder makes a folder that only own can enter.
func newFolder(path string, own *owner) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	return giveTo(own, path)
}
