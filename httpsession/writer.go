package httpsession

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
)

// writer lets the token leave before the first byte of the response does. http.ResponseController gets past it to the
// writer inside by Unwrap, and whatever starts the response is a method here.
type writer struct {
	http.ResponseWriter
	x *exchange
}

// wrap returns a writer that has the optional interfaces which the one inside has, itself or further in: code that
// asserts http.Flusher or http.Hijacker takes the answer for what the server can do.
//
// What is always there works either way: io.ReaderFrom and io.StringWriter fall back on Write, CloseNotify on the
// request's context.
func wrap(inside http.ResponseWriter, x *exchange) http.ResponseWriter {
	w := &writer{inside, x}
	f, h, p := flusher{w}, hijacker{w}, pusher{w}
	_, flushes := reach[http.Flusher](inside)
	if !flushes {
		_, flushes = reach[interface{ FlushError() error }](inside)
	}
	_, hijacks := reach[http.Hijacker](inside)
	_, pushes := reach[http.Pusher](inside)
	switch {
	case flushes && hijacks && pushes:
		return struct {
			*writer
			flusher
			hijacker
			pusher
		}{w, f, h, p}
	case flushes && hijacks: // HTTP/1
		return struct {
			*writer
			flusher
			hijacker
		}{w, f, h}
	case flushes && pushes: // HTTP/2
		return struct {
			*writer
			flusher
			pusher
		}{w, f, p}
	case hijacks && pushes:
		return struct {
			*writer
			hijacker
			pusher
		}{w, h, p}
	case flushes:
		return struct {
			*writer
			flusher
		}{w, f}
	case hijacks:
		return struct {
			*writer
			hijacker
		}{w, h}
	case pushes:
		return struct {
			*writer
			pusher
		}{w, p}
	}
	return w
}

// reach finds the first writer that is a T, from w inwards.
func reach[T any](w http.ResponseWriter) (found T, ok bool) {
	for w != nil {
		if found, ok = w.(T); ok {
			return found, true
		}
		outer, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			break
		}
		w = outer.Unwrap()
	}
	return found, false
}

// Unwrap is for http.ResponseController.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader implements http.ResponseWriter. Informational headers come before the one that carries the token.
func (w *writer) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		w.x.first(status)
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *writer) Write(b []byte) (int, error) {
	w.x.first(http.StatusOK)
	return w.ResponseWriter.Write(b)
}

// WriteString implements io.StringWriter.
func (w *writer) WriteString(s string) (int, error) {
	w.x.first(http.StatusOK)
	return io.WriteString(w.ResponseWriter, s)
}

// ReadFrom implements io.ReaderFrom, so that io.Copy to the writer inside may use sendfile.
func (w *writer) ReadFrom(r io.Reader) (int64, error) {
	w.x.first(http.StatusOK)
	return io.Copy(w.ResponseWriter, r)
}

// CloseNotify implements http.CloseNotifier, which is deprecated and which gin asserts all the same.
func (w *writer) CloseNotify() <-chan bool {
	if n, ok := w.ResponseWriter.(interface{ CloseNotify() <-chan bool }); ok {
		return n.CloseNotify()
	}
	gone := make(chan bool, 1)
	context.AfterFunc(w.x.request.Context(), func() { gone <- true })
	return gone
}

// flusher implements http.Flusher, and FlushError for http.ResponseController.
type flusher struct{ w *writer }

func (f flusher) Flush() { _ = f.FlushError() } // as Flush has always been

func (f flusher) FlushError() error {
	f.w.x.first(http.StatusOK)
	return http.NewResponseController(f.w.ResponseWriter).Flush()
}

// hijacker implements http.Hijacker.
type hijacker struct{ w *writer }

func (h hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	h.w.x.first(0)
	return http.NewResponseController(h.w.ResponseWriter).Hijack()
}

// pusher implements http.Pusher.
type pusher struct{ w *writer }

func (p pusher) Push(target string, opts *http.PushOptions) error {
	inside, ok := reach[http.Pusher](p.w.ResponseWriter)
	if !ok {
		return http.ErrNotSupported
	}
	return inside.Push(target, opts)
}
