// Package pgsplittest starts real PostgreSQL clusters for tests: one primary and its streaming replicas, in a fraction
// of a second, with every kind of trouble that a program with read replicas meets in production.
//
//	func TestListSeesItsOwnInsert(t *testing.T) {
//		cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
//		db, _ := sql.Open("pgsplit", cluster.DSN())
//		defer db.Close()
//
//		cluster.Replicas[0].PauseReplay(t.Context()) // from here on this replica is stale
//		...
//	}
//
// # Trouble
//
// Servers: [Server.PauseReplay] makes a replica stale, [Server.Stop], [Server.Kill] and [Server.Restart] end it,
// [Server.KillBackend] restarts its children under the same postmaster, [Server.Freeze] stops its processes without
// closing a connection, [Server.Promote] makes it a primary.
//
// The network: each server has a [Proxy] in front of it (address in [Server.ProxyURI], all of them in
// [Cluster.ProxyDSN]) that adds delay, resets connections, swallows bytes, counts round trips, or behaves like a
// connection pooler. [Cluster.RoundRobin] is one address with all replicas behind it.
//
// # Waiting
//
// Replication is asynchronous. [Cluster.CatchUp] waits until the replicas have what the primary has, and
// [Server.WaitFor] until one server has a given position. No call waits for ever: a context without a deadline is
// given one minute.
//
// # Servers
//
// Only initdb and postgres are needed, of version 13 or later; [FindBinaries] tells where they are looked for. Servers
// listen on 127.0.0.1 and on a unix socket, trust everybody, and have a superuser and a database named postgres. They
// run with fsync=off and autovacuum=off, so that nothing but the test changes anything, and their data lies in memory
// where there is room. Run as root, the package starts them as the user postgres, or else nobody, since PostgreSQL
// refuses to run as root. On Linux they end when the test process dies, however it dies.
//
// A Cluster has goroutines while it is open, and none after Close: a test that looks for leaked goroutines while a
// cluster is open should ignore those that were there before (goleak.IgnoreCurrent).
package pgsplittest
