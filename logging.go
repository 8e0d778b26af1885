package pgsplit

import (
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
)

// This file writes to Config.Logger: what changed about a server, never what a request did.

// The lines, in one place.
const (
	logState    = "pgsplit: a server's state has changed"
	logTimeline = "pgsplit: the primary follows a later timeline: there was a failover"
	logCluster  = "pgsplit: another cluster answers at the primary's address"
	logInstance = "pgsplit: another instance answers at a server's address: it was restarted, or is another one"
)

// log writes one line about the server.
func (s *server) log(level slog.Level, line string, attrs ...slog.Attr) {
	logger := s.connector.config.Logger
	if logger == nil {
		return
	}
	all := append([]slog.Attr{slog.String("server", s.name), slog.String("role", string(s.stats.role))}, attrs...)
	_ = contained("Logger", func() error { // there is nobody else to tell
		logger.LogAttrs(context.Background(), level, line, all...)
		return nil
	})
}

func (s *server) logChange(c change, cause error) {
	level := slog.LevelWarn
	if c.to == healthy {
		level = slog.LevelInfo
	}
	s.log(level, logState, slog.String("from", c.from.String()), slog.String("to", c.to.String()),
		slog.String("cause", s.told(cause)), slog.Uint64("probes", s.stats.probes.Load()))
}

func (s *server) logTimeline(before, now uint32) {
	if before != 0 && now > before {
		s.log(slog.LevelWarn, logTimeline, slog.Uint64("from", uint64(before)), slog.Uint64("to", uint64(now)))
	}
}

func (s *server) logCluster(before, now uint64) {
	if before != 0 && now != before {
		s.log(slog.LevelWarn, logCluster, slog.Uint64("from", before), slog.Uint64("to", now))
	}
}

// logInstance tells instances apart by what sessions know them by.
func (s *server) logInstance(before, now uint32) {
	if before != 0 && now != 0 && now != before {
		s.log(slog.LevelInfo, logInstance, slog.Uint64("from", uint64(before)), slog.Uint64("to", uint64(now)))
	}
}

// told is the text of an error without the server's configured password, in case a hook or a dialer quotes it. pgx's own
// errors do not.
func (s *server) told(err error) string {
	if err == nil {
		return ""
	}
	text := err.Error()
	password := s.config.ConnConfig.Password
	if password == "" {
		return text
	}
	return inAnyForm(password).ReplaceAllLiteralString(strings.ReplaceAll(text, password, "xxxxx"), "xxxxx")
}

// inAnyForm finds a password as it may stand in a URI, whichever of its characters are escaped, and in a quoted text.
func inAnyForm(password string) *regexp.Regexp {
	var b strings.Builder
	for _, r := range password {
		b.WriteString(`(?:\\?` + regexp.QuoteMeta(string(r)) + "|")
		for _, octet := range []byte(string(r)) {
			fmt.Fprintf(&b, "%%(?i:%02x)", octet)
		}
		if r == ' ' {
			b.WriteString(`|\+`)
		}
		b.WriteString(")")
	}
	return regexp.MustCompile(b.String())
}
