package pgsplit

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// F13, and a schema that is not replayed yet: with these a read moves on, with others it does not.
func TestOnlyTheTroubleOfAServerMovesAReadOn(t *testing.T) {
	codes := map[string][2]bool{ // from a server in recovery, from a primary
		"40001": {true, false}, "40P01": {true, false},
		"57P01": {true, true}, "57P02": {true, true}, "57P03": {true, true}, "57P04": {true, true}, "53300": {true, true},
		"42P01": {true, true}, "42703": {true, true}, "42704": {true, true}, "42883": {true, true},
		"25006": {}, "57014": {}, "22P02": {}, "3F000": {}, "23505": {}, "42601": {}, "0A000": {}, "53200": {},
	}
	for code, moves := range codes {
		for i, recovering := range []bool{true, false} {
			p := &physical{id: identity{inRecovery: recovering}}
			err := fmt.Errorf("a read: %w", &pgconn.PgError{Code: code})
			if got := p.elsewhere(err); got != moves[i] {
				t.Errorf("%s, in recovery %t: %t", code, recovering, got)
			}
		}
	}
	if (&physical{}).elsewhere(hookError{errors.New("refused")}) {
		t.Error("a hook's refusal moves a read on")
	}
}
