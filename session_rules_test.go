package pgsplit_test

import (
	"context"
	"database/sql"
	"math"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

func tokenOf(t testing.TB, ctx context.Context, s *pgsplit.Session) pgsplit.Token {
	t.Helper()
	token, err := s.Token(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// A session costs a transaction no round trip, and ten autocommit writes with the read behind them one.
func TestWhatASessionCostsInRoundTrips(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.ProxyDSN())
	exec(t, ctx, db, "create table notes (id int)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	transaction := func(ctx context.Context) func() error {
		return func() error { return inTx(ctx, db, nil, "insert into notes values (1)") }
	}
	plain := roundTrips(t, cluster, transaction(ctx))
	session := pgsplit.NewSession()
	inSession := pgsplit.WithSession(ctx, session)
	if got := roundTrips(t, cluster, transaction(inSession)); got != plain {
		t.Errorf("a transaction takes %d round trips in a session and %d without", got, plain)
	}
	captures := connectorOf(t, db).Stats().Captures
	if tokenOf(t, ctx, session).IsZero() || connectorOf(t, db).Stats().Captures != captures {
		t.Error("the transaction's commit did not tell where it ended")
	}
	tenWrites := func(ctx context.Context) func() error {
		return func() error {
			for range 10 {
				if _, err := db.ExecContext(ctx, "insert into notes values (2)"); err != nil {
					return err
				}
			}
			if err := cluster.CatchUp(ctx); err != nil {
				return err
			}
			var n int
			return db.QueryRowContext(pgsplit.ReadOnly(ctx), "select 1").Scan(&n)
		}
	}
	plain = roundTrips(t, cluster, tenWrites(ctx))
	// One for the position, and one to see that the replica has it.
	if got := roundTrips(t, cluster, tenWrites(inSession)); got > plain+2 {
		t.Errorf("ten writes and a read take %d round trips in a session and %d without", got, plain)
	}
	before := connectorOf(t, db).Stats().Captures
	if err := tenWrites(inSession)(); err != nil {
		t.Fatal(err)
	}
	if got := connectorOf(t, db).Stats().Captures - before; got != 1 {
		t.Errorf("the primary was asked %d times where ten writes ended", got)
	}
}

// A position that the primary never had is lost or forged: nobody waits for it, and the caller goes on.
func TestATokenFromTheFutureIsNotWaitedFor(t *testing.T) {
	_, db, ctx := sessionCluster(t, 1, "replica_max_wait=20s")
	exec(t, ctx, db, "insert into notes values (1)")
	session := pgsplit.NewSession()
	inSession := pgsplit.WithSession(ctx, session)
	exec(t, inSession, db, "insert into notes values (2)")
	token := tokenOf(t, ctx, session)
	token.Floors[0].LSN = math.MaxUint64
	session = pgsplit.SessionFromToken(token)
	short, cancel := context.WithTimeout(pgsplit.WithSession(ctx, session), 30*time.Second)
	defer cancel()
	if got := text(t, pgsplit.ReadOnly(short), db, whatAndWhere); got != "2 false" {
		t.Errorf("the first read: %s", got)
	}
	if n := connectorOf(t, db).Stats().LostTokens; n != 1 {
		t.Errorf("%d lost tokens counted", n)
	}
	if !session.Changed() {
		t.Error("the caller gets no new token")
	}
	again := tokenOf(t, ctx, session)
	if len(again.Floors) != 1 || again.Floors[0].LSN == math.MaxUint64 || again.Floors[0].LSN == 0 {
		t.Errorf("%+v", again)
	}
	eventually(t, "reads are on the replica again", func() bool {
		return text(t, pgsplit.ReadOnly(pgsplit.WithSession(ctx, pgsplit.SessionFromToken(again))), db, whatAndWhere) == "2 true"
	})
}

func TestATokenOfAnotherClusterIsKeptAndNotObeyed(t *testing.T) {
	_, db, ctx := sessionCluster(t, 1)
	foreign := pgsplit.Token{Floors: []pgsplit.TokenFloor{{System: 7, Timeline: 3, LSN: math.MaxUint64}}}
	session := pgsplit.SessionFromToken(foreign)
	if got := text(t, pgsplit.ReadOnly(pgsplit.WithSession(ctx, session)), db, whatAndWhere); got != "0 true" {
		t.Error(got)
	}
	if n := connectorOf(t, db).Stats().ForeignTokens; n != 1 {
		t.Errorf("%d foreign tokens counted", n)
	}
	exec(t, pgsplit.WithSession(ctx, session), db, "insert into notes values (1)")
	token := tokenOf(t, ctx, session)
	if f, ok := token.Floor(7); !ok || f.LSN != math.MaxUint64 || len(token.Floors) != 2 {
		t.Errorf("%+v", token)
	}
}

func TestPinsAndDistrustSendReadsToThePrimary(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	pauseAll(t, ctx, cluster)
	exec(t, ctx, db, "insert into notes values (1)")
	where := func(s *pgsplit.Session) string {
		return text(t, pgsplit.ReadOnly(pgsplit.WithSession(ctx, s)), db, whatAndWhere)
	}
	if got := where(pgsplit.NewSession()); got != "0 true" {
		t.Fatal(got)
	}
	pinned := pgsplit.NewSession()
	pinned.Pin(time.Minute)
	written := pgsplit.NewSession()
	written.MarkWritten()
	early := map[string]pgsplit.Token{}
	for name, s := range map[string]*pgsplit.Session{"pinned": pinned, "written": written, "no trust": pgsplit.SessionWithoutTrust()} {
		if !s.Changed() {
			t.Errorf("%s: no token to leave", name)
		}
		early[name] = tokenOf(t, ctx, s)
		if got := where(s); got != "1 false" {
			t.Errorf("%s: %s", name, got)
		}
		if got := where(pgsplit.SessionFromToken(tokenOf(t, ctx, s))); got != "1 false" {
			t.Errorf("%s, by its token: %s", name, got)
		}
	}
	// A token can leave before any server was met.
	for name, token := range early {
		if got := where(pgsplit.SessionFromToken(token)); got != "1 false" {
			t.Errorf("%s, by the token that left before the first statement: %s", name, got)
		}
	}
}

func TestSessionsNestAndKeepTheFloorsOfAll(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	pauseAll(t, ctx, cluster)
	outer, inner := pgsplit.NewSession(), pgsplit.NewSession()
	inOuter := pgsplit.WithSession(ctx, outer)
	exec(t, pgsplit.WithSession(inOuter, inner), db, "insert into notes values (1)")
	for name, s := range map[string]*pgsplit.Session{"outer": outer, "inner": inner} {
		if got := text(t, pgsplit.ReadOnly(pgsplit.WithSession(ctx, s)), db, whatAndWhere); got != "1 false" {
			t.Errorf("%s: %s", name, got)
		}
	}
	around := pgsplit.WithSession(inOuter, pgsplit.NewSession())
	if got := text(t, pgsplit.ReadOnly(around), db, whatAndWhere); got != "1 false" {
		t.Errorf("a new session inside the outer one: %s", got)
	}
	if s, ok := pgsplit.SessionFrom(around); !ok || s == outer {
		t.Error("SessionFrom is not the innermost")
	}
	if _, ok := pgsplit.SessionFrom(ctx); ok {
		t.Error("a session out of nowhere")
	}
}

func TestASessionAtAPositionReadsFromThereOn(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	pauseAll(t, ctx, cluster)
	exec(t, ctx, db, "insert into notes values (1)")
	at := pgsplit.ReadOnly(pgsplit.WithSession(ctx, pgsplit.SessionAt(commitLSN(t, ctx, db))))
	if got := text(t, at, db, whatAndWhere); got != "1 false" {
		t.Error(got)
	}
}

// While rows of INSERT .. RETURNING are open nothing has committed, and a position read then would be too low (F2).
func TestAPositionIsNotTakenWhileTheWritesRowsAreOpen(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	session := pgsplit.NewSession()
	inSession := pgsplit.WithSession(ctx, session)
	rows, err := db.QueryContext(inSession, "insert into notes select i from generate_series(1, 100) i returning id")
	if err != nil {
		t.Fatal(err)
	}
	if !rows.Next() {
		t.Fatal(rows.Err())
	}
	if got := text(t, pgsplit.ReadOnly(inSession), db, inRecovery); got != "false" {
		t.Error("a read went to a replica while the write was under way")
	}
	token := tokenOf(t, ctx, session)
	if len(token.Floors) != 1 || !token.Floors[0].Resolve {
		t.Errorf("%+v does not tell its reader to ask", token)
	}
	if err := rows.Close(); err != nil {
		t.Fatal(err)
	}
	pauseAll(t, ctx, cluster)
	exec(t, ctx, db, "insert into notes values (101)")
	if got := text(t, pgsplit.ReadOnly(pgsplit.WithSession(ctx, pgsplit.SessionFromToken(token))), db, whatAndWhere); got != "101 false" {
		t.Errorf("by the token: %s", got)
	}
}

// A token that a transaction puts into its own job says that there is more to come.
func TestATokenFromInsideATransactionTellsItsReaderToAsk(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	pauseAll(t, ctx, cluster)
	session := pgsplit.NewSession()
	tx, err := db.BeginTx(pgsplit.WithSession(ctx, session), nil)
	if err != nil {
		t.Fatal(err)
	}
	exec(t, ctx, tx, "insert into notes values (1)")
	token := tokenOf(t, ctx, session)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	payload, err := token.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	var received pgsplit.Token
	if err := received.UnmarshalText(payload); err != nil {
		t.Fatal(err)
	}
	job := pgsplit.WithSession(ctx, pgsplit.SessionFromToken(received))
	if got := text(t, pgsplit.ReadOnly(job), db, whatAndWhere); got != "1 false" {
		t.Error(got)
	}
}

// Who has read on one replica and written elsewhere may see less nowhere, however the tokens of both come together: the position
// of the write says nothing of what the replica had shown.
func TestMergedTokensShowNoLessThanEachOfThem(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 2)
	ahead, behind := cluster.Replicas[0], cluster.Replicas[1]
	onlyOn := func(s *pgsplittest.Server) *sql.DB { return open(t, cluster.Primary.URI()+" "+s.URI()) }
	exec(t, ctx, db, "insert into notes values (1)")
	wrote := pgsplit.SessionAt(commitLSN(t, ctx, db))
	text(t, pgsplit.ReadOnly(pgsplit.WithSession(ctx, wrote)), db, whatAndWhere) // it knows the cluster
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	if err := behind.PauseReplay(ctx); err != nil {
		t.Fatal(err)
	}
	exec(t, ctx, db, "insert into notes values (2)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	read := pgsplit.NewSession()
	read.CarryReads()
	if got := text(t, pgsplit.ReadOnly(pgsplit.WithSession(ctx, read)), onlyOn(ahead), whatAndWhere); got != "2 true" {
		t.Fatal(got)
	}
	one, other := tokenOf(t, ctx, wrote), tokenOf(t, ctx, read)
	if one.Floors[0].LSN <= other.Floors[0].LSN || other.Floors[0].Instance == 0 {
		t.Fatalf("not the tokens that this is about: %+v, %+v", one, other)
	}
	for name, merged := range map[string]pgsplit.Token{"": one.Merge(other), " the other way round": other.Merge(one)} {
		again := pgsplit.ReadOnly(pgsplit.WithSession(ctx, pgsplit.SessionFromToken(merged)))
		if got := text(t, again, onlyOn(behind), whatAndWhere); got != "2 false" {
			t.Errorf("merged%s: %s", name, got)
		}
	}
}

// A connection that is lost during COMMIT may commit later: until its backend is gone no position covers it (F2).
func TestAWriteOfUnknownOutcomePinsTheSessionUntilItsBackendIsGone(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	primary := cluster.Primary
	_, proxied, err := net.SplitHostPort(primary.Proxy().Addr())
	if err != nil {
		t.Fatal(err)
	}
	db := open(t, "host=127.0.0.1,127.0.0.1 port="+proxied+","+strconv.Itoa(primary.Port())+
		" user=postgres dbname=postgres sslmode=disable replica=127.0.0.1:"+strconv.Itoa(cluster.Replicas[0].Port()))
	exec(t, ctx, db, "create table notes (id int primary key, body text)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	// A lock makes the statement wait, its client goes away unheard, and the lock is released later.
	locker, err := primary.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer locker.Close(ctx)
	if _, err := locker.Exec(ctx, "begin; lock table notes"); err != nil {
		t.Fatal(err)
	}
	session := pgsplit.NewSession()
	inSession := pgsplit.WithSession(ctx, session)
	waiting := make(chan error, 1)
	go func() {
		_, err := db.ExecContext(inSession, "insert into notes values (1)")
		waiting <- err
	}()
	blocked := func() string {
		return onServer(t, ctx, primary, "select count(*)::text from pg_stat_activity where wait_event_type = 'Lock'")
	}
	eventually(t, "the insert waits", func() bool { return blocked() == "1" })
	primary.Proxy().Cut() // for good, so that no request to cancel the statement arrives either
	if err := <-waiting; err == nil {
		t.Fatal("the insert succeeded")
	}
	if got := blocked(); got != "1" {
		t.Fatal("the server noticed that its client is gone")
	}
	if got := text(t, pgsplit.ReadOnly(inSession), db, inRecovery); got != "false" {
		t.Error("a read went to a replica while the write might still commit")
	}
	if token, err := session.Token(ctx); err != nil || !token.Floors[0].PinnedUntil.After(time.Now()) {
		t.Errorf("%+v %v: not pinned", token, err)
	}
	if _, err := locker.Exec(ctx, "commit"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the write has landed and its backend is gone", func() bool {
		return blocked() == "0" && onServer(t, ctx, primary, "select count(*)::text from notes") == "1"
	})
	eventually(t, "reads are on the replica again, and show the row", func() bool {
		got := text(t, pgsplit.ReadOnly(inSession), db, whatAndWhere)
		if got[:1] != "1" {
			t.Fatalf("the row is missing: %s", got)
		}
		return got == "1 true"
	})
}

// failOver stops the primary and promotes a replica that was stopped before and lacks the last of the log. The new primary
// has been found when it has taken the row.
func failOver(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster, db *sql.DB, heir *pgsplittest.Server, row int) {
	t.Helper()
	stop(t, cluster.Primary)
	start(t, heir)
	if err := heir.Promote(ctx); err != nil {
		t.Fatal(err)
	}
	cluster.Primary = heir
	eventually(t, "the new primary is found", func() bool {
		_, err := db.ExecContext(ctx, "insert into notes values ($1)", row)
		return err == nil
	})
}

// A standby is promoted without the last of the log: what the old tokens say is lost, and nobody pretends otherwise.
func TestAfterALossyFailoverOldTokensGiveWayToNewOnes(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	old, heir, other := cluster.Primary, cluster.Replicas[0], cluster.Replicas[1]
	dsn := "host=127.0.0.1,127.0.0.1 port=" + strconv.Itoa(old.Port()) + "," + strconv.Itoa(heir.Port()) +
		" user=postgres dbname=postgres sslmode=disable replica=127.0.0.1:" + strconv.Itoa(other.Port())
	db := open(t, dsn)
	exec(t, ctx, db, "create table notes (id int primary key, body text)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	stop(t, heir) // it does not get what comes now
	session := pgsplit.NewSession()
	exec(t, pgsplit.WithSession(ctx, session), db, "insert into notes select i from generate_series(1, 1000) i")
	token := tokenOf(t, ctx, session)
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	failOver(t, ctx, cluster, db, heir, 5000)
	// More log than the old primary ever wrote, so that positions alone prove nothing.
	exec(t, ctx, db, "insert into notes select i from generate_series(10001, 20000) i")
	session = pgsplit.SessionFromToken(token)
	inSession := pgsplit.WithSession(ctx, session)
	if got := text(t, pgsplit.ReadOnly(inSession), db, inRecovery); got != "false" {
		t.Error("a server that follows the old timeline answered for the new one")
	}
	again := tokenOf(t, ctx, session)
	if len(again.Floors) != 1 || again.Floors[0].Timeline <= token.Floors[0].Timeline || !session.Changed() {
		t.Errorf("the caller goes on with %+v after %+v", again, token)
	}
	if n := connectorOf(t, db).Stats().LostTokens; n != 1 {
		t.Errorf("%d lost tokens counted", n)
	}
	exec(t, inSession, db, "insert into notes values (5001)")
	// The replica still follows the old primary: it never has what the new one writes, whatever its position says.
	if got := text(t, pgsplit.ReadOnly(inSession), db, "select count(*)::text from notes where id = 5001"); got != "1" {
		t.Error("the caller's own write is missing")
	}
}

// A caller may end its transaction by text, and go on in another one: what the first one wrote is its own, however the second
// one ends.
func TestATokenCoversATransactionThatWasEndedByText(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	pauseAll(t, ctx, cluster)
	commit, rollback := (*sql.Tx).Commit, (*sql.Tx).Rollback
	id := 0
	for _, c := range []struct {
		name string
		then []string
		end  func(*sql.Tx) error
	}{
		{"commit and chain, commit", []string{"commit and chain"}, commit},
		{"commit and chain, rollback", []string{"commit and chain"}, rollback},
		{"commit, begin, commit", []string{"commit", "begin"}, commit},
		{"commit, begin in one message, rollback", []string{"commit; begin"}, rollback},
	} {
		for _, insert := range []string{
			"insert into notes values ($1) returning id::text",
			"with w as (insert into notes values ($1) returning id) select id::text from w",
		} {
			id++
			session := pgsplit.NewSession()
			tx, err := db.BeginTx(pgsplit.WithSession(ctx, session), nil)
			if err != nil {
				t.Fatal(err)
			}
			text(t, ctx, tx, insert, id)
			for _, then := range c.then {
				exec(t, ctx, tx, then, pgx.QueryExecModeSimpleProtocol)
			}
			if err := c.end(tx); err != nil {
				t.Fatal(err)
			}
			next := pgsplit.WithSession(ctx, pgsplit.SessionFromToken(tokenOf(t, ctx, session)))
			if got := text(t, pgsplit.ReadOnly(next), db, "select count(*)::text from notes where id = $1", id); got != "1" {
				t.Errorf("%s: %q is not seen", c.name, insert)
			}
		}
	}
}
