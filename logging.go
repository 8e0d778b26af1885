package pgsplit

import (
	"context"
	"log/slog"
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
	all := append([]slog.Attr{slog.String("server", s.name), slog.String("role", s.role.String())}, attrs...)
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
		slog.String("cause", textOf(cause)), slog.Uint64("probes", s.stats.probes.Load()))
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
