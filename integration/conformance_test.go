package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"net/url"
	"reflect"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Whatever a program can see of database/sql over raw pgx it sees the same over pgsplit, as long as it gives no hint. Each
// conformanceCase does something and notes all that it sees. It runs over raw pgx and over pgsplit, in databases that are
// copies of one, and the notes must be equal. Where pgsplit means to differ, a test of its own says how, in
// conformance_differences_test.go.
type conformanceCase struct {
	name string
	do   func(*run)
}

// casesBehind are the cases to run behind a wrapper, by ground.
func casesBehind(w wrapper) []conformanceCase {
	if w.otherwise {
		return slices.Concat(connectCases, connCases, rowsCases, poolCases)
	}
	return slices.Concat(valueCases, errorCases, connectCases, txCases, stmtCases, connCases, rowsCases, poolCases, gormCases)
}

// bases are what a case runs over. The first is what the others are compared with.
var bases = []base{
	{name: "raw pgx", driver: "pgx"},
	{name: "pgsplit on a primary alone", driver: "pgsplit"},
	{name: "pgsplit on a primary with replicas", driver: "pgsplit", replicas: 2},
}

type base struct {
	name     string
	driver   string
	replicas int // in its DSN
}

// ground is a cluster with a database to copy for each subject.
type ground struct {
	cluster cluster
}

const (
	groundReplicas = 2
	template       = "conformance"

	// fixtures are in the template so that the copies have the same OIDs, which are the names of unknown types.
	fixtures = `
create domain positive as int check (value > 0);
create type mood as enum ('sad', 'ok', 'happy');
create table parent (id int primary key);
create table child (
	id int primary key,
	parent int references parent deferrable initially immediate,
	label varchar(20) not null,
	price numeric(12, 4),
	constraint price_check check (price >= 0)
);
create table once (id int, constraint once_id unique (id) deferrable initially deferred);
insert into parent values (1), (2), (3);
insert into child values (1, 1, 'one', 1.5), (2, 2, 'two', null);
`
)

// guard makes a user that needs a password, whoever runs the server: everybody else may come in without.
const guard = `
set password_encryption = 'scram-sha-256';
create role guarded login password 'right';
do $$
declare
	lines text := E'host all guarded all scram-sha-256\n' || pg_read_file(current_setting('hba_file'));
begin
	execute format($copy$ copy (select line from unnest(string_to_array(%L, E'\n')) line where line <> '') to %L
		with (format csv, quote E'\x01', delimiter E'\x02') $copy$, lines, current_setting('hba_file'));
end
$$;
select pg_reload_conf()`

// untilGuarded waits until the server has read its configuration again.
func (g *ground) untilGuarded(t *testing.T, ctx context.Context) {
	t.Helper()
	uri := edited(g.cluster.PrimaryURI(), func(u *url.URL) { u.User = url.UserPassword("guarded", "wrong") })
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := queryValue[int](ctx, uri, "select 1")
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && pgErr.Code == "28P01" {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("a wrong password is still let in: %v", err)
		}
	}
}

func newGround(t *testing.T) *ground {
	t.Helper()
	g := &ground{cluster: startCluster(t, groundReplicas)}
	ctx, cancel := context.WithTimeout(t.Context(), caseLimit)
	defer cancel()
	mustExec(t, ctx, g.cluster.PrimaryURI(), "create database "+template)
	mustExec(t, ctx, withDatabase(g.cluster.PrimaryURI(), template), fixtures)
	mustExec(t, ctx, g.cluster.PrimaryURI(), guard)
	g.untilGuarded(t, ctx)
	return g
}

func withDatabase(uri, name string) string {
	return edited(uri, func(u *url.URL) { u.Path = "/" + name })
}

func edited(uri string, edit func(*url.URL)) string {
	u, err := url.Parse(uri)
	if err != nil {
		panic(err)
	}
	edit(u)
	return u.String()
}

// setParameter adds a connection parameter.
func setParameter(u *url.URL, name, value string) {
	q := u.Query()
	q.Set(name, value)
	u.RawQuery = q.Encode()
}

// subject is a base behind a wrapper, with a database of its own.
type subject struct {
	ground   *ground
	base     base
	wrapper  wrapper
	database string
}

var databases atomic.Int64

func (g *ground) subject(t *testing.T, b base, w wrapper) *subject {
	t.Helper()
	s := &subject{ground: g, base: b, wrapper: w, database: fmt.Sprintf("subject%d", databases.Add(1))}
	ctx, cancel := context.WithTimeout(t.Context(), caseLimit)
	defer cancel()
	mustExec(t, ctx, g.cluster.PrimaryURI(), "create database "+s.database+" template "+template)
	mustExec(t, ctx, g.cluster.PrimaryURI(), "create role "+s.database+" login connection limit 1")
	return s
}

// dsn is the subject's DSN with each server's URI edited.
func (s *subject) dsn(edit func(*url.URL)) string {
	uris := []string{s.ground.cluster.PrimaryURI()}
	for i := range s.base.replicas {
		uris = append(uris, s.ground.cluster.ReplicaURI(i))
	}
	for i, uri := range uris {
		uris[i] = edited(withDatabase(uri, s.database), edit)
	}
	return strings.Join(uris, " ")
}

// run is one case over one subject.
type run struct {
	*subject
	ctx context.Context
	db  *sql.DB

	application string // by which the server knows the run's connections
	notes       []string
	failure     string // what the case did not expect, over whichever driver
	admin       *pgx.Conn
	opened      []*sql.DB
}

var applications atomic.Int64

func (s *subject) newRun(ctx context.Context) *run {
	return &run{subject: s, ctx: ctx, application: fmt.Sprintf("run%d", applications.Add(1))}
}

// open opens another sql.DB on the subject, with each server's URI edited.
func (r *run) open(edit func(*url.URL)) *sql.DB {
	db, err := r.wrapper.open(r.base.driver, r.subject.dsn(func(u *url.URL) {
		setParameter(u, "application_name", r.application)
		edit(u)
	}))
	r.must(err)
	r.opened = append(r.opened, db)
	return db
}

func (r *run) end() {
	for _, db := range r.opened {
		_ = db.Close() // a case may have closed it
	}
	if r.admin != nil {
		_ = r.admin.Close(context.WithoutCancel(r.ctx))
	}
}

// behind is the same subject, with its database, behind another wrapper.
func (s *subject) behind(w wrapper) *subject {
	other := *s
	other.wrapper = w
	return &other
}

// perform opens the run's sql.DB and does the case to its end, however that comes.
func (r *run) perform(do func(*run)) {
	var wg sync.WaitGroup
	wg.Go(func() {
		defer r.end()
		defer func() {
			if cause := recover(); cause != nil {
				r.failure = fmt.Sprintf("panic: %v\n%s", cause, debug.Stack())
			}
		}()
		r.db = r.open(func(*url.URL) {})
		do(r)
	})
	wg.Wait()
}

// fail ends the case: what it saw it expects of no driver.
func (r *run) fail(format string, args ...any) {
	_, file, line, _ := runtime.Caller(2)
	r.failure = fmt.Sprintf("%s:%d: %s", file[strings.LastIndexByte(file, '/')+1:], line, fmt.Sprintf(format, args...))
	runtime.Goexit()
}

func (r *run) must(err error) {
	if err != nil {
		r.fail("%v", err)
	}
}

// exec runs a statement that must succeed.
func (r *run) exec(q execer, query string, args ...any) {
	if _, err := q.ExecContext(r.ctx, query, args...); err != nil {
		r.fail("%s: %v", query, err)
	}
}

// text runs a query of one text that must succeed.
func (r *run) text(q queryer, query string, args ...any) string {
	var s string
	if err := q.QueryRowContext(r.ctx, query, args...).Scan(&s); err != nil {
		r.fail("%s: %v", query, err)
	}
	return s
}

// execer and queryer are sql.DB, sql.Conn and sql.Tx.
type execer interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

type queryer interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
}

// ask asks the primary for one value, on a connection that is not the subject's.
func (r *run) ask(dest any, query string, args ...any) {
	if r.admin == nil {
		var err error
		r.admin, err = pgx.Connect(r.ctx, withDatabase(r.ground.cluster.PrimaryURI(), r.database))
		r.must(err)
	}
	if err := r.admin.QueryRow(r.ctx, query, args...).Scan(dest); err != nil {
		r.fail("%s: %v", query, err)
	}
}

// backends counts the connections that the run has to the primary, in which condition holds.
func (r *run) backends(condition string) (n int) {
	r.ask(&n, "select count(*) from pg_stat_activity where application_name = $1 and ("+condition+")", r.application)
	return n
}

// untilBackends waits until the run has so many connections to the primary in which the condition holds.
func (r *run) untilBackends(want int, condition string) {
	got := 0
	r.until(func() bool {
		got = r.backends(condition)
		return got == want
	}, func() string { return fmt.Sprintf("%d connections with %s, want %d", got, condition, want) })
}

const (
	anyState = "true"
	sleeping = "wait_event = 'PgSleep'"
)

// patience is how long a condition may take to come true.
const patience = time.Minute

func (r *run) until(done func() bool, otherwise func() string) {
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline.C:
			r.fail("after %v: %s", patience, otherwise())
		case <-r.ctx.Done():
			r.fail("%v: %s", r.ctx.Err(), otherwise())
		}
	}
}

// kill ends the run's connections to the primary in which the condition holds, and waits for their end.
func (r *run) kill(condition string) {
	var n int
	r.ask(&n, `select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = $1 and (`+condition+`)`,
		r.application)
	if n == 0 {
		r.fail("no connection to kill where %s", condition)
	}
	r.untilBackends(0, condition)
}

// note notes what the case saw.
func (r *run) note(what string, seen ...any) {
	values := make([]string, len(seen))
	for i, v := range seen {
		values[i] = r.show(v)
	}
	r.notes = append(r.notes, what+": "+strings.Join(values, ", "))
}

// show is the value and its type.
func (r *run) show(v any) string {
	switch v := v.(type) {
	case nil:
		return "nil"
	case error:
		return r.showError(v)
	case time.Time:
		return "time " + v.Format(time.RFC3339Nano) + " in " + v.Location().String()
	case []byte:
		return fmt.Sprintf("bytes %q", v)
	case reflect.Type:
		return "type " + v.String()
	}
	if p := reflect.ValueOf(v); p.Kind() == reflect.Pointer && !p.IsNil() {
		return "*" + r.show(p.Elem().Interface())
	}
	return fmt.Sprintf("%T(%+v)", v, v)
}

// sentinels are the errors that programs compare with.
var sentinels = []struct {
	name string
	err  error
}{
	{"context.Canceled", context.Canceled},
	{"context.DeadlineExceeded", context.DeadlineExceeded},
	{"driver.ErrBadConn", driver.ErrBadConn},
	{"net.ErrClosed", net.ErrClosed},
	{"pgx.ErrTxClosed", pgx.ErrTxClosed},
	{"pgx.ErrTxCommitRollback", pgx.ErrTxCommitRollback},
	{"sql.ErrConnDone", sql.ErrConnDone},
	{"sql.ErrNoRows", sql.ErrNoRows},
	{"sql.ErrTxDone", sql.ErrTxDone},
}

// ours is what pgsplit puts in front of an error of pgx that comes while it connects.
var ours = regexp.MustCompile(`^(pgsplit: no primary: )?pgsplit: primary [^ ]+: `)

// address is a pointer as pgx prints one.
var address = regexp.MustCompile(`\(0x[0-9a-f]+\)`)

// databaseOID is how PostgreSQL names a database that a lock is in, since 19 in the context of a lock timeout.
var databaseOID = regexp.MustCompile(`of database \d+`)

// showError is all of an error that programs look at.
func (r *run) showError(err error) string {
	var s strings.Builder
	s.WriteString("error")
	for _, sentinel := range sentinels {
		if errors.Is(err, sentinel.err) {
			fmt.Fprintf(&s, " is %s,", sentinel.name)
		}
	}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		seen := *pgErr
		seen.File, seen.Line, seen.Routine = "", 0, ""
		fmt.Fprintf(&s, " as %+v,", seen)
	}
	var connectErr *pgconn.ConnectError
	if errors.As(err, &connectErr) {
		fmt.Fprintf(&s, " as ConnectError of %s,", connectErr.Config.User)
	}
	var opErr *net.OpError
	if errors.As(err, &opErr) {
		fmt.Fprintf(&s, " as net.OpError of %s,", opErr.Op)
	}
	fmt.Fprintf(&s, " timeout %v, safe to retry %v: %s", pgconn.Timeout(err), pgconn.SafeToRetry(err),
		ours.ReplaceAllString(err.Error(), ""))
	text := databaseOID.ReplaceAllString(address.ReplaceAllString(s.String(), "(ADDRESS)"), "of database OID")
	return strings.NewReplacer(r.database, "DATABASE", r.application, "APPLICATION").Replace(text)
}

// caseLimit is when a case has hung.
const caseLimit = 3 * time.Minute

// compare runs a case over all subjects at the same time.
func compare(t *testing.T, subjects []*subject, c conformanceCase) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), caseLimit)
	defer cancel()
	runs := make([]*run, len(subjects))
	var wg sync.WaitGroup
	for i, s := range subjects {
		runs[i] = s.newRun(ctx)
		wg.Go(func() { runs[i].perform(c.do) })
	}
	wg.Wait()
	for _, r := range runs {
		if r.failure != "" {
			t.Errorf("%s: %s", r.base.name, r.failure)
		}
	}
	if t.Failed() {
		return
	}
	if len(runs[0].notes) == 0 {
		t.Error("the case noted nothing")
	}
	for _, r := range runs[1:] {
		if difference := firstDifference(runs[0].notes, r.notes); difference != "" {
			t.Errorf("%s and %s differ:\n%s", runs[0].base.name, r.base.name, difference)
		}
	}
}

// firstDifference is where two lists part; "" if they do not.
func firstDifference(a, b []string) string {
	for i := range max(len(a), len(b)) {
		x, y := "(nothing more)", "(nothing more)"
		if i < len(a) {
			x = a[i]
		}
		if i < len(b) {
			y = b[i]
		}
		if x != y {
			return fmt.Sprintf("note %d\n  %s\n  %s", i+1, x, y)
		}
	}
	return ""
}

func TestEveryCaseSeesTheSameOverPgsplitAsOverRawPgx(t *testing.T) {
	g := newGround(t)
	t.Run("wrappers", func(t *testing.T) {
		for _, w := range wrappers {
			t.Run(w.name, func(t *testing.T) {
				t.Parallel()
				var subjects []*subject
				for i, b := range bases {
					if w.otherwise && i == 1 {
						continue // it is the same wrapper: what differs is how it gets at the driver
					}
					subjects = append(subjects, g.subject(t, b, w))
				}
				for _, c := range casesBehind(w) {
					t.Run(c.name, func(t *testing.T) { compare(t, subjects, c) })
				}
			})
		}
	})
}

func TestADifferenceBetweenTwoDriversFailsACase(t *testing.T) {
	r := &run{subject: &subject{database: "d1"}, application: "run1"}
	r.note("a number", int64(1))
	r.note("an error", fmt.Errorf("%w in d1", driver.ErrBadConn))
	for _, other := range [][]string{nil, r.notes[:1], {r.notes[0], "an error: nil"}, append(slices.Clone(r.notes), "more")} {
		if firstDifference(r.notes, other) == "" {
			t.Errorf("%q passes for %q", other, r.notes)
		}
	}
	s := &run{subject: &subject{database: "d2"}, application: "run2"}
	s.note("a number", int64(1))
	s.note("an error", fmt.Errorf("pgsplit: primary h:1: %w in d2", driver.ErrBadConn))
	if difference := firstDifference(r.notes, s.notes); difference != "" {
		t.Errorf("what names only the subject differs: %s", difference)
	}
	if s.note("a number", int32(1)); s.notes[2] == s.notes[0] {
		t.Error("types do not count")
	}
}
