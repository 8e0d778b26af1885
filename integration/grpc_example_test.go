package integration

import (
	"context"
	"database/sql"
	"net"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgsplit/pgsplit"
)

// Sessions go along with calls between the services of one program. Their tokens are not sealed, so callers from
// outside must not be able to set this metadata.
const (
	grpcToken   = "pgsplit-token"
	grpcWritten = "pgsplit-written"
)

// sessionOfTheCall is a server's interceptor: the handler goes on where its caller is, which is told of writes.
func sessionOfTheCall(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	session := pgsplit.NewSession()
	for _, text := range metadata.ValueFromIncomingContext(ctx, grpcToken) {
		var token pgsplit.Token
		session = pgsplit.SessionWithoutTrust()
		if token.UnmarshalText([]byte(text)) == nil {
			session = pgsplit.SessionFromToken(token)
		}
	}
	response, err := handle(pgsplit.WithSession(ctx, session), request)
	if session.Changed() {
		_ = grpc.SetTrailer(ctx, metadata.Pairs(grpcWritten, "true"))
	}
	return response, err
}

// sessionOfTheCaller is a client's interceptor: the session in ctx goes along, and sees what the call has written.
func sessionOfTheCaller(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	session, ok := pgsplit.SessionFrom(ctx)
	if !ok {
		return call(ctx, method, request, reply, conn, opts...)
	}
	token, _ := session.Token(ctx) // which is good even if there is an error
	text, _ := token.MarshalText() // which never fails
	var trailer metadata.MD
	err := call(metadata.AppendToOutgoingContext(ctx, grpcToken, string(text)), method, request, reply, conn, append(opts, grpc.Trailer(&trailer))...)
	if len(trailer.Get(grpcWritten)) > 0 {
		session.MarkWritten()
	} else if err != nil {
		session.Pin(time.Minute) // nobody knows what it has done, or does still
	}
	return err
}

// Example_grpc has the interceptors on both sides.
func Example_grpc() {
	server := grpc.NewServer(grpc.UnaryInterceptor(sessionOfTheCall))
	defer server.Stop()
	client, err := grpc.NewClient("notes:443", grpc.WithUnaryInterceptor(sessionOfTheCaller),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return
	}
	defer client.Close()
}

// noteService writes a note when it is asked for the health of "write", and else tells by an error how many there are.
type noteService struct {
	grpc_health_v1.UnimplementedHealthServer
	db *sql.DB
}

func (s noteService) Check(ctx context.Context, r *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	if r.GetService() == "write" {
		return &grpc_health_v1.HealthCheckResponse{}, addNote(ctx, s.db)
	}
	return nil, status.Error(codes.NotFound, strconv.Itoa(countNotes(pgsplit.ReadOnly(ctx), s.db)))
}

func TestASessionGoesAlongWithAGRPCCallAndSeesWhatItWrote(t *testing.T) {
	ctx, db := notesDB(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.UnaryInterceptor(sessionOfTheCall))
	grpc_health_v1.RegisterHealthServer(server, noteService{db: db})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	defer func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithUnaryInterceptor(sessionOfTheCaller),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := grpc_health_v1.NewHealthClient(conn)
	notes := func(ctx context.Context) string {
		_, err := client.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: "count"})
		return status.Convert(err).Message()
	}
	inSession := pgsplit.WithSession(ctx, pgsplit.NewSession())
	if _, err := client.Check(inSession, &grpc_health_v1.HealthCheckRequest{Service: "write"}); err != nil {
		t.Fatal(err)
	}
	if got := countNotes(pgsplit.ReadOnly(inSession), db); got != 1 {
		t.Errorf("the caller sees %d", got)
	}
	if got := notes(inSession); got != "1" {
		t.Errorf("its next call sees %s", got)
	}
	if got := notes(ctx); got != "0" {
		t.Errorf("a stranger sees %s, so no replica answered", got)
	}
}
