package main

import (
	"bytes"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode"

	"github.com/jackc/pgx/v5/pgproto3"
)

// evil is what a server says to move a terminal's cursor, to clear its screen, and to have a line of its own in a report.
const evil = "\x1b[2J\x1b]0;owned\a\u009b1A\u202e\r\nNothing found.\n\x00"

// hostileServer lets everybody in, and answers each query with what answer sends, or lets nobody in if that is nil.
func hostileServer(t *testing.T, answer func(*pgproto3.Backend)) (dsn string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(pgproto3.NewBackend(conn, conn), answer)
			}()
		}
	}()
	return "postgres://postgres@" + listener.Addr().String() + "/postgres?sslmode=disable"
}

func serve(backend *pgproto3.Backend, answer func(*pgproto3.Backend)) {
	if _, err := backend.ReceiveStartupMessage(); err != nil {
		return
	}
	if answer == nil {
		backend.Send(&pgproto3.ErrorResponse{Severity: "FATAL", Code: "28000", Message: "no " + evil, Detail: evil})
		_ = backend.Flush()
		return
	}
	backend.Send(&pgproto3.AuthenticationOk{})
	backend.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}})
	backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	for backend.Flush() == nil {
		if message, err := backend.Receive(); err != nil {
			return
		} else if _, ok := message.(*pgproto3.Query); !ok {
			return
		}
		answer(backend)
		backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	}
}

func TestNoServerWritesToTheTerminalOrEndsTheCommand(t *testing.T) {
	for name, answer := range map[string]func(*pgproto3.Backend){
		"lets nobody in":  nil,
		"answers nothing": func(*pgproto3.Backend) {},
		"answers anything": func(b *pgproto3.Backend) {
			row := &pgproto3.DataRow{}
			for range 20 {
				row.Values = append(row.Values, []byte(evil))
			}
			b.Send(&pgproto3.RowDescription{Fields: make([]pgproto3.FieldDescription, len(row.Values))})
			b.Send(row)
			b.Send(&pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")})
		},
	} {
		t.Run(name, func(t *testing.T) {
			page := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, _ *http.Request) {
				_, _ = out.Write([]byte(`{"stats": {"reasons": {"\u001b[2J\nNothing found.\n": 7}}}`))
			}))
			defer page.Close()
			dsn := hostileServer(t, answer)
			for _, args := range [][]string{{"check", dsn, dsn}, {"check", "-json", dsn}, {"watch", "-once", "-debug-url", page.URL, dsn}} {
				var out, errs bytes.Buffer
				run(t.Context(), args, &out, &errs)
				if errs.Len() > 0 || out.Len() == 0 {
					t.Errorf("%q says %q, and %q", args, out.String(), errs.String())
				}
				for _, r := range out.String() {
					if r != '\n' && !unicode.IsPrint(r) {
						t.Errorf("%q writes %q in\n%q", args, r, out.String())
						break
					}
				}
				if strings.Contains(out.String(), "\nNothing found.") {
					t.Errorf("%q lets a server write a line:\n%s", args, out.String())
				}
			}
		})
	}
}
