// Package soak looks for broken promises of pgsplit on a real cluster that is in trouble. It has the parts, and their
// names, of a Jepsen test:
//
//   - generators: several processes, each with callers that write, read, open transactions, turn pages, queue jobs, and
//     hand their sessions' tokens to one another
//   - a nemesis that kills, stops, pauses, cuts off, slows and starves servers, by a seeded schedule
//   - a history of every operation, with its times and its outcome, in a file of JSON lines for each process
//   - a checker, Check, a function of the history alone, whose verdict names the rule that is broken and the operations
//     that show it
//
// A write raises the version of one key of table register by one, and appends (operation, key, version) to table ledger,
// which would take the same operation twice. So the ledger is the order of all writes of a key, and a read of a version
// says exactly how much it saw.
//
// The checker has to be able to fail: TestEveryMutantIsCaught runs it on drivers that break one promise each (build tag
// pgsplit_mutants of package pgsplit).
package soak
