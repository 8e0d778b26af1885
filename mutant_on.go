//go:build pgsplit_mutants

package pgsplit

import "os"

// mutations are the values of PGSPLIT_MUTANT.
var mutations = map[string]mutation{
	"":                     noMutant,
	"position-per-address": positionPerAddress,
	"check-in-snapshot":    checkInsideSnapshot,
	"flush-after-async":    flushAfterAsync,
	"last-writer-merge":    lastWriterMerge,
	"retry-sent-write":     retrySentWrite,
	"keep-after-restart":   keepAfterRestart,
	"null-caught-up":       nullCaughtUp,
	"floor-with-rows-open": floorWithRowsOpen,
	"unpin-early":          unpinEarly,
}

var mutant = chosenMutant()

func chosenMutant() mutation {
	name := os.Getenv("PGSPLIT_MUTANT")
	m, known := mutations[name]
	if !known {
		panic("pgsplit: PGSPLIT_MUTANT=" + name + " is no mutant")
	}
	return m
}
