package pgsplittest

import (
	"encoding/binary"
	"errors"
	"io"
	"net"

	"github.com/jackc/pgx/v5/pgproto3"
)

// A PoolerMode is a way in which connection poolers differ from servers.
type PoolerMode int32

const (
	// PoolerOff forwards everything as it is.
	PoolerOff PoolerMode = iota
	// PoolerDropsParameter takes default_transaction_read_only out of the startup message, as PgBouncer does with
	// ignore_startup_parameters, and changes the process id in BackendKeyData, as every pooler does.
	PoolerDropsParameter
	// PoolerRefusesParameter answers a startup message with default_transaction_read_only in it with FATAL 08P01, as
	// PgBouncer did by default before it knew the parameter. It changes the process id as well.
	PoolerRefusesParameter
)

// EmulatePooler makes the proxy treat the connections that it accepts from now on like a pooler, as far as the start of
// a connection goes: each still has a server connection of its own, and keeps it. TLS is declined. Cancel requests work.
func (p *Proxy) EmulatePooler(mode PoolerMode) { p.pooler.Store(int32(mode)) }

const readOnlyParameter = "default_transaction_read_only"

// Codes that a first message has in place of a protocol version.
const (
	cancelRequest     = 80877102
	sslRequest        = 80877103
	gssEncRequest     = 80877104
	longestFirst      = 10000 // PostgreSQL's own limit for a first message
	firstHeaderLength = 8     // length and code
)

// poolerPID is the process id that a client sees in place of the server's, and the server's in place of the client's.
func poolerPID(pid uint32) uint32 { return pid ^ 1<<30 }

var (
	errRefused     = errors.New("refused")
	errNotPostgres = errors.New("not the PostgreSQL protocol")
)

// greetClient queues a client's first message, changed as the mode demands. It reads no byte beyond it.
func (l *link) greetClient() error {
	for {
		message := make([]byte, firstHeaderLength)
		if _, err := io.ReadFull(l.client, message); err != nil {
			return err
		}
		length := binary.BigEndian.Uint32(message)
		if length < firstHeaderLength || length > longestFirst {
			return errNotPostgres
		}
		message = append(message, make([]byte, length-firstHeaderLength)...)
		if _, err := io.ReadFull(l.client, message[firstHeaderLength:]); err != nil {
			return err
		}
		switch binary.BigEndian.Uint32(message[4:]) {
		case sslRequest, gssEncRequest:
			l.enqueue(toClient, packet{data: []byte("N")})
			continue
		case cancelRequest:
			if length < firstHeaderLength+4 {
				return errNotPostgres
			}
			pid := message[firstHeaderLength:]
			binary.BigEndian.PutUint32(pid, poolerPID(binary.BigEndian.Uint32(pid)))
			l.enqueueFromClient(message)
			return nil
		}
		message, err := l.greet(message)
		if err != nil {
			return err
		}
		l.enqueueFromClient(message)
		return nil
	}
}

// greet returns what a pooler sends for a startup message.
func (l *link) greet(message []byte) ([]byte, error) {
	var startup pgproto3.StartupMessage
	if err := startup.Decode(message[4:]); err != nil {
		return nil, err
	}
	if _, ok := startup.Parameters[readOnlyParameter]; !ok {
		return message, nil
	}
	if l.pooler == PoolerRefusesParameter {
		return nil, l.refuse("unsupported startup parameter: " + readOnlyParameter)
	}
	delete(startup.Parameters, readOnlyParameter)
	return startup.Encode(nil)
}

// refuse sends the client away, and returns when it has gone.
func (l *link) refuse(why string) error {
	response := &pgproto3.ErrorResponse{Severity: "FATAL", Code: "08P01", Message: why}
	data, err := response.Encode(nil)
	if err != nil {
		return err
	}
	l.enqueue(toClient, packet{data: data})
	l.enqueue(toClient, packet{end: io.EOF})
	if _, err := io.Copy(io.Discard, l.client); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return errRefused
}

// greetServer queues the server's messages up to the first ReadyForQuery or error, with the process id changed.
func (l *link) greetServer() error {
	for {
		message := make([]byte, 5)
		if _, err := io.ReadFull(l.server, message); err != nil {
			return err
		}
		kind, length := message[0], binary.BigEndian.Uint32(message[1:])
		if length < 4 || length > 1<<20 {
			return errNotPostgres
		}
		message = append(message, make([]byte, length-4)...)
		body := message[5:]
		if _, err := io.ReadFull(l.server, body); err != nil {
			return err
		}
		if kind == 'K' && len(body) >= 4 { // BackendKeyData
			binary.BigEndian.PutUint32(body, poolerPID(binary.BigEndian.Uint32(body)))
		}
		l.enqueue(toClient, packet{data: message})
		if kind == 'Z' || kind == 'E' { // ReadyForQuery, ErrorResponse
			return nil
		}
	}
}
