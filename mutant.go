package pgsplit

// mutation is a promise that the driver breaks on purpose, so that it can be seen that the checker in integration/soak
// notices. The constant mutant is noMutant, and the code of all others is gone, unless the build tag pgsplit_mutants is
// given; PGSPLIT_MUTANT then says which one it is, by its name in mutations.
type mutation uint8

const (
	noMutant mutation = iota
	// positionPerAddress remembers replay positions by the address that was dialled (F9).
	positionPerAddress
	// checkInsideSnapshot asks for the replay position in the snapshot that the read has (F4).
	checkInsideSnapshot
	// flushAfterAsync takes the flush position for the end of an asynchronous commit (F2).
	flushAfterAsync
	// lastWriterMerge lets the last one of two tokens win.
	lastWriterMerge
	// retrySentWrite says that a statement whose connection was lost was never sent.
	retrySentWrite
	// keepAfterRestart remembers replay positions across the lives of a server (F7).
	keepAfterRestart
	// nullCaughtUp reads a replay position that is NULL as all that there is.
	nullCaughtUp
	// floorWithRowsOpen asks for a write's position before its rows were read to their end (F2).
	floorWithRowsOpen
	// unpinEarly forgets a write of unknown outcome while its backend may still commit (F2).
	unpinEarly
)
