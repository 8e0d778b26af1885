package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// note is a row of http_notes, for the libraries that the pages name.
type note struct{ ID int }

func (note) TableName() string { return "http_notes" }

// What the README and docs/ say about other libraries and about running it. The test of the pages finds its blocks here.
func TestWhatThePagesSay(t *testing.T) {
	ctx := limited(t)
	c := startCluster(t, 1)
	// A slow machine is not a replica in trouble.
	t.Setenv("DATABASE_URL", c.PrimaryURI())
	t.Setenv("DATABASE_RO_URL", c.ReplicaURI(0))
	db, err := sql.Open("pgsplit", strings.Replace(c.DSN(), "?", "?replica_timeout=20s&", 1))
	must(t, err)
	defer db.Close()
	_, err = db.ExecContext(ctx, "create table http_notes (id int generated always as identity); insert into http_notes default values")
	must(t, err)
	must(t, c.CatchUp(ctx, 0))

	t.Run("GORM and sqlx read on a replica", func(t *testing.T) {
		connector, err := pgsplit.FromDB(db)
		must(t, err)
		before := connector.Stats().Reasons["replica"]
		for _, read := range []func(context.Context, *sql.DB) (int, error){readWithGORM, readWithSqlx} {
			n, err := read(ctx, db)
			must(t, err)
			if n != 1 {
				t.Errorf("%d notes, want 1", n)
			}
		}
		if n := connector.Stats().Reasons["replica"] - before; n != 2 {
			t.Errorf("%d reads on the replica, want 2", n)
		}
	})
	t.Run("GORM and the driver's name", func(t *testing.T) { gormByDriverName(t, ctx, c) })
	t.Run("GORM and time zones", func(t *testing.T) { gormZones(t, ctx, c) })
	t.Run("a DSN in Go", func(t *testing.T) {
		config, err := configFromText()
		must(t, err)
		if len(config.Replicas) != 2 || config.ReplicaTimeout != 500*time.Millisecond || config.Replicas[1].Label != "eu-west" {
			t.Errorf("%v", config)
		}
	})
	t.Run("options in Go", func(t *testing.T) {
		db, err := openWithOptions()
		must(t, err)
		defer db.Close()
		wantRecovery(t, pgsplit.ReadOnly(ctx), "ReadOnly", db, true)
	})
	t.Run("back to pgx", func(t *testing.T) { backToPgx(t, ctx) })
	t.Run("a held connection is no *stdlib.Conn", func(t *testing.T) {
		conn, err := db.Conn(ctx)
		must(t, err)
		defer conn.Close()
		must(t, conn.Raw(func(c any) error {
			if _, ok := c.(*stdlib.Conn); ok {
				return errors.New("it is one")
			}
			return nil
		}))
		must(t, pgsplit.Raw(ctx, conn, func(c *pgx.Conn) error { return c.Ping(ctx) }))
	})
	t.Run("one plain server", func(t *testing.T) {
		plain, err := sql.Open("pgsplit", c.PrimaryURI())
		must(t, err)
		defer plain.Close()
		must(t, aWriteIsRefused(ctx, plain))
	})
	t.Run("after a migration", func(t *testing.T) { schemaLag(t, ctx, c, db) })
	t.Run("readiness, and the order of an end", func(t *testing.T) {
		ready := readiness(db)
		status := func() int {
			w := httptest.NewRecorder()
			ready.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/ready", nil))
			return w.Code
		}
		if got := status(); got != http.StatusOK {
			t.Errorf("ready: %d", got)
		}
		must(t, c.StopPrimary(ctx))
		if got := status(); got != http.StatusOK {
			t.Errorf("ready without a primary: %d", got)
		}
		if err := db.PingContext(ctx); !errors.Is(err, pgsplit.ErrNoPrimary) {
			t.Errorf("a ping without a hint: %v", err)
		}
		must(t, c.StopReplica(ctx, 0))
		if got := status(); got != http.StatusServiceUnavailable {
			t.Errorf("ready without any server: %d", got)
		}
		ended, end := context.WithCancel(ctx)
		end()
		must(t, serve(ended, ready, db))
		if err := db.PingContext(ctx); err == nil {
			t.Error("the sql.DB is still open")
		}
	})
}

func readWithGORM(ctx context.Context, db *sql.DB) (int, error) {
	g, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{})
	if err != nil {
		return 0, err
	}
	var notes []note
	err = g.WithContext(pgsplit.ReadOnly(ctx)).Find(&notes).Error
	return len(notes), err
}

func readWithSqlx(ctx context.Context, db *sql.DB) (int, error) {
	x := sqlx.NewDb(db, "pgx")
	var notes []note
	err := x.SelectContext(pgsplit.ReadOnly(ctx), &notes, "select id from http_notes")
	return len(notes), err
}

// With another driver's name than pgx, GORM's migrator prepares what it asks a table for, and that does not outlive a
// change of the table.
func gormByDriverName(t *testing.T, ctx context.Context, c cluster) {
	for name, broken := range map[string]bool{"": false, "pgx": false, "pgsplit": true} {
		db, err := sql.Open("pgsplit", c.DSN())
		must(t, err)
		g, err := gorm.Open(postgres.New(postgres.Config{Conn: db, DriverName: name}), &gorm.Config{Logger: logger.Discard})
		must(t, err)
		g = g.WithContext(ctx).Table("gorm_names")
		must(t, g.Exec("drop table if exists gorm_names").Error)
		type before struct{ ID int }
		type after struct {
			ID   int
			More string
		}
		must(t, g.AutoMigrate(&before{}))
		must(t, g.AutoMigrate(&before{}))
		must(t, g.AutoMigrate(&after{}))
		var pgErr *pgconn.PgError
		if err := g.AutoMigrate(&after{}); errors.As(err, &pgErr) != broken || broken && pgErr.Code != "0A000" {
			t.Errorf("with the driver name %q: %v", name, err)
		}
		must(t, db.Close())
	}
}

// A time zone in GORM's own DSN is that of timestamps without one; a sql.DB reads them as UTC unless it is told.
func gormZones(t *testing.T, ctx context.Context, c cluster) {
	config, err := pgsplit.ParseDSN(c.DSN())
	must(t, err)
	tokyo, err := time.LoadLocation("Asia/Tokyo")
	must(t, err)
	readTimestampsIn(config, tokyo)
	told, err := pgsplit.OpenDB(config)
	must(t, err)
	defer told.Close()
	untold, err := sql.Open("pgsplit", c.DSN())
	must(t, err)
	defer untold.Close()
	separator := "?"
	if strings.Contains(c.PrimaryURI(), "?") {
		separator = "&"
	}
	for name, one := range map[string]struct {
		dialector gorm.Dialector
		zone      *time.Location
	}{
		"GORM's own": {postgres.Open(c.PrimaryURI() + separator + "TimeZone=Asia/Tokyo"), tokyo},
		"untold":     {postgres.New(postgres.Config{Conn: untold}), time.UTC},
		"told":       {postgres.New(postgres.Config{Conn: told}), tokyo},
	} {
		g, err := gorm.Open(one.dialector, &gorm.Config{})
		must(t, err)
		var got time.Time
		must(t, g.WithContext(pgsplit.ReadOnly(ctx)).Raw("select timestamp '2024-07-01 12:00'").Row().Scan(&got))
		if want := time.Date(2024, 7, 1, 12, 0, 0, 0, one.zone); !got.Equal(want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
		pool, err := g.DB()
		must(t, err)
		must(t, pool.Close())
	}
}

func readTimestampsIn(config *pgsplit.Config, location *time.Location) {
	afterConnect := func(_ context.Context, conn *pgx.Conn) error {
		codec := &pgtype.TimestampCodec{ScanLocation: location}
		conn.TypeMap().RegisterType(&pgtype.Type{Name: "timestamp", OID: pgtype.TimestampOID, Codec: codec})
		return nil
	}
	config.Primary.AfterConnect = afterConnect
	for _, r := range config.Replicas {
		r.Pool.AfterConnect = afterConnect
	}
}

func configFromText() (*pgsplit.Config, error) {
	config, err := pgsplit.ParseDSN(`
		postgres://app@db1/shop?replica_timeout=500ms
		postgres://app@db2/shop
		postgres://app@db3/shop?label=eu-west`)
	return config, err
}

func openWithOptions() (*sql.DB, error) {
	config, err := pgsplit.ConfigFromEnv("") // DATABASE_URL and DATABASE_RO_URL
	if err != nil {
		return nil, err
	}
	config.MaxWait = 100 * time.Millisecond
	config.ReplicaTimeout = 20 * time.Second
	return pgsplit.OpenDB(config)
}

// The same code on pgx alone: hints and sessions mean nothing, and what asks this driver gets an error.
func backToPgx(t *testing.T, ctx context.Context) {
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	must(t, err)
	defer db.Close()
	session := pgsplit.NewSession()
	read := pgsplit.ReadOnly(pgsplit.WithSession(ctx, session), pgsplit.ReplicaOnly())
	wantRecovery(t, read, "pgx", db, false)
	if countNotes(read, db) != 1 {
		t.Error("the note is not there")
	}
	if token, err := session.Token(read); err != nil || !token.IsZero() {
		t.Errorf("token %v %v", token, err)
	}
	_, ofLSN := pgsplit.CommitLSN(ctx, db)
	_, ofDB := pgsplit.FromDB(db)
	conn, err := db.Conn(ctx)
	must(t, err)
	defer conn.Close()
	ofRaw := pgsplit.Raw(ctx, conn, func(*pgx.Conn) error { return nil })
	if ofLSN == nil || ofDB == nil || ofRaw == nil {
		t.Errorf("CommitLSN: %v, FromDB: %v, Raw: %v", ofLSN, ofDB, ofRaw)
	}
}

func aWriteIsRefused(ctx context.Context, db *sql.DB) error {
	_, err := db.ExecContext(pgsplit.ReadOnly(ctx), "insert into http_notes default values")
	if !errors.Is(err, pgsplit.ErrReadOnly) {
		return fmt.Errorf("a write under ReadOnly: %w", err)
	}
	return nil
}

func readiness(db *sql.DB) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, r *http.Request) {
		if err := db.PingContext(pgsplit.ReadOnly(r.Context())); err != nil {
			http.Error(w, "no server answers", http.StatusServiceUnavailable)
		}
	})
	return mux
}

// serve serves until ctx ends.
func serve(ctx context.Context, handler http.Handler, db *sql.DB) error {
	server := &http.Server{Addr: "127.0.0.1:0", Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.ListenAndServe() }()

	<-ctx.Done() // of signal.NotifyContext(.., syscall.SIGTERM)
	limited, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err := errors.Join(server.Shutdown(limited), db.Close()) // in this order

	if e := <-served; !errors.Is(e, http.ErrServerClosed) {
		err = errors.Join(err, e)
	}
	return err
}

// What a migration has brought is on the primary at once, and on a replica when that has replayed it.
func schemaLag(t *testing.T, ctx context.Context, c cluster, db *sql.DB) {
	exec := func(query string) {
		t.Helper()
		_, err := db.ExecContext(ctx, query)
		must(t, err)
	}
	exec("create type mood as enum ('fine')")
	must(t, c.CatchUp(ctx, 0))
	must(t, c.PauseReplay(ctx, 0))
	exec("alter table http_notes add column title text default 'x'")
	exec("alter type mood add value 'tired'")
	exec("create schema fresh; create function fresh.f() returns int language sql return 1")
	for query, code := range map[string]string{
		"select title from http_notes": "", // moves on to the primary
		"select 'tired'::mood::text":   pgInvalidText,
		"select fresh.f()::text":       pgNoSchema,
	} {
		for ctx, want := range map[context.Context]string{pgsplit.ReadOnly(ctx): code, pgsplit.Primary(ctx): ""} {
			var s string
			err := db.QueryRowContext(ctx, query).Scan(&s)
			var pgErr *pgconn.PgError
			if got := ""; errors.As(err, &pgErr) {
				got = pgErr.Code
				if got != want {
					t.Errorf("%s: %v, want code %q", query, err, want)
				}
			} else if err != nil || want != "" {
				t.Errorf("%s: %v, want code %q", query, err, want)
			}
		}
	}
	must(t, c.ResumeReplay(ctx, 0))
	must(t, c.CatchUp(ctx, 0))
	var s string
	must(t, db.QueryRowContext(pgsplit.ReadOnly(ctx), "select 'tired'::mood::text").Scan(&s))
}

const (
	pgInvalidText = "22P02" // invalid_text_representation
	pgNoSchema    = "3F000" // invalid_schema_name
)

// A stale replica in a test: the list shows what was just added all the same.
func TestTheListShowsWhatWasJustAdded(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	db, err := sql.Open("pgsplit", cluster.DSN())
	must(t, err) // ends the test on an error
	defer db.Close()
	_, err = db.Exec("create table http_notes (id int generated always as identity)")
	must(t, err)
	must(t, cluster.CatchUp(t.Context()))
	must(t, cluster.Replicas[0].PauseReplay(t.Context())) // from here on it is stale

	ctx := pgsplit.WithSession(t.Context(), pgsplit.NewSession())
	must(t, addNote(ctx, db))
	if n := countNotes(pgsplit.ReadOnly(ctx), db); n != 1 {
		t.Errorf("%d notes, want the one that was added", n)
	}
}
