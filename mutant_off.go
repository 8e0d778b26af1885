//go:build !pgsplit_mutants

package pgsplit

const mutant = noMutant
