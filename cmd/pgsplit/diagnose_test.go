package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/pgsplit/pgsplit"
)

// found is an instance without anything to complain about.
func found(role, id string) *instance {
	return &instance{Found: role, Version: "17.2", num: 170002, System: "7", Timeline: 3, ReadOnly: readOnlyHolds,
		SeesOthers: true, Receiving: true, Slot: "slot_" + id, Feedback: true, KeepMB: 0, Slots: []string{"slot_b", "slot_c"}, id: id}
}

func at(address string, instances ...*instance) *host {
	return &host{Address: address, Attempts: 3, Instances: instances}
}

// healthy is a primary with two replicas.
func healthy() []server {
	return []server{
		{Name: "primary", Role: rolePrimary, Attrs: "any", Hosts: []*host{at("a:5432", found(rolePrimary, "a"))}},
		{Name: "b:5432", Role: roleReplica, Attrs: "any", Hosts: []*host{at("b:5432", found(roleStandby, "b"))}},
		{Name: "c:5432", Role: roleReplica, Attrs: "any", Hosts: []*host{at("c:5432", found(roleStandby, "c"))}},
	}
}

func TestEachMistakeIsFoundByItsName(t *testing.T) {
	failed := func(code, message, detail string) func(s []server) {
		return func(s []server) {
			*s[1].Hosts[0] = host{Address: "b:5432", Attempts: 3, Failed: 3, Code: code, Cause: message, Detail: detail}
		}
	}
	b := func(change func(i *instance)) func(s []server) {
		return func(s []server) { change(s[1].Hosts[0].Instances[0]) }
	}
	a := func(change func(i *instance)) func(s []server) {
		return func(s []server) { change(s[0].Hosts[0].Instances[0]) }
	}
	for _, c := range []struct {
		name  string
		wrong func(s []server)
		want  string // severity, name and server of each finding
	}{
		{"nothing", func([]server) {}, ""},
		{"a promoted replica", b(func(i *instance) { i.Found = rolePrimary }), "error replica-is-primary b:5432"},
		{"a standby as the primary", a(func(i *instance) { i.Found = roleStandby }), "error primary-is-replica primary"},
		{"two hosts of the primary accept writes", func(s []server) {
			s[0].Attrs = "primary"
			s[0].Hosts = append(s[0].Hosts, at("x:5432", found(rolePrimary, "x")))
		}, "error two-primaries primary (a:5432), primary (x:5432)"},
		{"a standby among the primary's hosts is as it should be", func(s []server) {
			s[0].Attrs = "primary"
			s[0].Hosts = append(s[0].Hosts, at("c:5432", found(roleStandby, "c")))
		}, ""},
		{"any among several hosts", func(s []server) {
			s[0].Hosts = append(s[0].Hosts, at("c:5432", found(roleStandby, "c")))
		}, "warning target-session-attrs-inherited primary"},
		{"read-only on a replica", func(s []server) { s[1].Attrs = "read-only" }, "warning target-session-attrs-inherited b:5432"},
		{"a replica that asks for a standby and finds none", func(s []server) {
			s[1].Attrs = "standby"
			s[1].Hosts[0].Instances[0].Found = rolePrimary
		}, "error replica-is-primary b:5432"},
		{"another cluster", b(func(i *instance) { i.System = "8" }), "error other-cluster b:5432"},
		{"an unknown system identifier proves nothing", b(func(i *instance) { i.System = "" }), ""},
		{"it follows the old primary", b(func(i *instance) { i.Timeline = 2 }), "error other-timeline b:5432"},
		{"an older timeline that may be out of date", b(func(i *instance) { i.Timeline, i.SeesOthers = 2, false }),
			"warning other-timeline b:5432; note no-privilege b:5432"},
		{"the primary is the old one", b(func(i *instance) { i.Timeline = 4 }), "error other-timeline b:5432"},
		{"hot_standby off", failed("57P03", "the database system is not accepting connections", "Hot standby mode is disabled."), "error hot-standby-off b:5432"},
		{"not consistent yet", failed("57P03", "the database system is not yet accepting connections", "Consistent recovery state has not been yet reached."), "warning starting-up b:5432"},
		{"starting", failed("57P03", "the database system is starting up", ""), "warning starting-up b:5432"},
		{"shutting down", failed("57P03", "the database system is shutting down", ""), "warning starting-up b:5432"},
		{"nobody there", failed("", "connection refused", ""), "error unreachable b:5432"},
		{"one of several connections", func(s []server) { s[1].Hosts[0].Failed, s[1].Hosts[0].Cause = 1, "connection refused" }, "warning unreachable b:5432"},
		{"our own connections were the last", func(s []server) { s[1].Hosts[0].Failed, s[1].Hosts[0].Code = 1, "53300" }, ""},
		{"one of the primary's hosts", func(s []server) {
			s[0].Attrs = "primary"
			s[0].Hosts = append(s[0].Hosts, &host{Address: "x:5432", Attempts: 3, Failed: 3, Cause: "connection refused"})
		}, "warning unreachable primary (x:5432)"},
		{"the primary", func(s []server) {
			*s[0].Hosts[0] = host{Address: "a:5432", Attempts: 3, Failed: 3, Cause: "connection refused"}
		}, "error unreachable primary"},
		{"one replica by two names", b(func(i *instance) { i.id = "c" }), "warning same-address-twice b:5432, c:5432"},
		{"the primary as a replica", b(func(i *instance) { i.Found, i.id = rolePrimary, "a" }),
			"error replica-is-primary b:5432; error same-address-twice primary, b:5432"},
		{"one behind a balancer and by itself", func(s []server) {
			s[1].Hosts[0].Instances = append(s[1].Hosts[0].Instances, found(roleStandby, "c"))
		}, "warning same-address-twice b:5432 #2, c:5432"},
		{"a pooler that drops the parameter", b(func(i *instance) { i.Pooled, i.ReadOnly = true, readOnlyDropped }), "warning pooler-drops-read-only b:5432"},
		{"a pooler that refuses it", a(func(i *instance) { i.Pooled, i.ReadOnly = true, readOnlyRefused }), "warning pooler-drops-read-only primary"},
		{"a pooler that passes it", b(func(i *instance) { i.Pooled = true }), "note pooler b:5432"},
		{"no slot, nothing kept", b(func(i *instance) { i.Slot = "" }), "warning slot-missing b:5432"},
		{"no slot, some kept", func(s []server) {
			s[0].Hosts[0].Instances[0].KeepMB, s[1].Hosts[0].Instances[0].Slot = 512, ""
		}, "note slot-missing b:5432"},
		{"no slot, an archive", b(func(i *instance) { i.Slot, i.HasArchive = "", true }), "note slot-missing b:5432"},
		{"a slot that is not there", b(func(i *instance) { i.Slot, i.Receiving = "gone", false }), "error slot-missing b:5432; warning lagging b:5432"},
		{"a slot of another upstream", b(func(i *instance) { i.Slot = "elsewhere" }), ""},
		{"reads cancelled after a while", b(func(i *instance) { i.Feedback, i.CancelAfter = false, 30000 }), "note conflicts-cancel-reads b:5432"},
		{"reads cancelled at once", b(func(i *instance) { i.Feedback, i.CancelAfter = false, 0 }), "warning conflicts-cancel-reads b:5432"},
		{"reads never cancelled", b(func(i *instance) { i.Feedback, i.CancelAfter = false, -1 }), ""},
		{"reads cancelled by the archive", b(func(i *instance) { i.Feedback, i.CancelAfter, i.HasArchive = false, -1, true }),
			"warning conflicts-cancel-reads b:5432"},
		{"reads cancelled later by the archive", b(func(i *instance) {
			i.Feedback, i.CancelAfter, i.HasArchive, i.FromArchive = false, 30000, true, 60000
		}), "note conflicts-cancel-reads b:5432"},
		{"no archive to cancel reads", b(func(i *instance) { i.Feedback, i.CancelAfter, i.FromArchive = false, -1, 1000 }), ""},
		{"it cannot tell who it is", b(func(i *instance) { i.Missing = []string{"pg_control_checkpoint"} }), "error no-privilege b:5432"},
		{"the primary's positions are closed", a(func(i *instance) { i.Missing = []string{"pg_current_wal_insert_lsn"} }), "warning no-privilege primary"},
		{"which do not matter on a replica", b(func(i *instance) { i.Missing = []string{"pg_current_wal_insert_lsn"} }), ""},
		{"an ordinary role", b(func(i *instance) { i.SeesOthers = false }), "note no-privilege b:5432"},
		{"another major version", b(func(i *instance) { i.num, i.Version = 160004, "16.4" }), "warning version-skew b:5432"},
		{"another minor version", b(func(i *instance) { i.num, i.Version = 170001, "17.1" }), "note version-skew b:5432"},
		{"replay is paused", b(func(i *instance) { i.Paused, i.Lag = true, &lag{Bytes: 9, Left: 9} }), "warning lagging b:5432"},
		{"no receiver", b(func(i *instance) { i.Receiving = false }), "warning lagging b:5432"},
		{"no receiver, but an archive", b(func(i *instance) { i.Receiving, i.HasArchive = false, true }), ""},
		{"far behind", b(func(i *instance) { i.Lag = &lag{Bytes: 1 << 30, Left: 1 << 29} }), "warning lagging b:5432"},
		{"a little behind", b(func(i *instance) { i.Lag = &lag{Bytes: 112, Left: 112} }), "note lagging b:5432"},
		{"there in the end", b(func(i *instance) { i.Lag = &lag{Bytes: 1 << 30, Proven: true} }), ""},
		{"the primary's sessions write nothing", a(func(i *instance) { i.RefusesWrite = true }), "error primary-read-only primary"},
	} {
		servers := healthy()
		c.wrong(servers)
		var got []string
		for _, f := range diagnose(servers) {
			got = append(got, string(f.Severity)+" "+f.Name+" "+f.Server)
			if f.Message == "" || f.Remedy == "" && f.Severity != severityNote {
				t.Errorf("%s: no message or remedy: %+v", c.name, f)
			}
		}
		if text := strings.Join(got, "; "); text != c.want {
			t.Errorf("%s: %q, want %q", c.name, text, c.want)
		}
	}
	if got := diagnose(healthy()[:1]); len(got) != 1 || got[0].Name != "no-replicas" {
		t.Errorf("without replicas: %+v", got)
	}
}

func TestTheWorstFindingIsTheExitStatus(t *testing.T) {
	for want, severities := range [][]severity{{severityNote}, {severityNote, severityWarning}, {severityWarning, severityError, severityNote}} {
		var findings []finding
		for _, s := range severities {
			findings = append(findings, finding{Severity: s})
		}
		if got := exitStatus(findings); got != want {
			t.Errorf("%v: %d, want %d", severities, got, want)
		}
	}
	if got := exitStatus(nil); got != statusFine {
		t.Errorf("without findings: %d", got)
	}
}

func TestThePrimaryIsLookedForAmongItsHosts(t *testing.T) {
	standby, primary := found(roleStandby, "a"), found(rolePrimary, "b")
	s := server{Role: rolePrimary, Hosts: []*host{at("a:1", standby), at("b:1", primary)}}
	for attrs, want := range map[string]*instance{
		"primary": primary, "read-write": primary, "any": standby, "standby": standby, "read-only": standby, "prefer-standby": standby,
	} {
		s.Attrs = attrs
		if got := s.used(); len(got) != 1 || got[0] != want {
			t.Errorf("%s: %v", attrs, got)
		}
	}
	newer := found(rolePrimary, "c")
	newer.Timeline++
	s.Hosts, s.Attrs = append(s.Hosts, at("c:1", newer)), "primary"
	if got := s.used(); len(got) != 1 || got[0] != newer {
		t.Errorf("of two primaries: %v", got)
	}
	s.Hosts, s.Attrs = s.Hosts[1:2], "prefer-standby"
	if got := s.used(); len(got) != 1 || got[0] != primary {
		t.Errorf("prefer-standby without one: %v", got)
	}
}

func TestAPositionBehindAPageHeaderIsNotWaitedFor(t *testing.T) {
	for position, want := range map[string]string{
		"0/3000028": "0/3000000", "0/3002018": "0/3002000", "0/3002028": "0/3002028", "0/3000148": "0/3000148",
	} {
		i := &instance{block: 8192, segment: 16 << 20}
		i.setPosition(position)
		if got := i.replayable().String(); got != want {
			t.Errorf("%s: %s, want %s", position, got, want)
		}
	}
}

func TestTheReportFitsItsWidth(t *testing.T) {
	r := report{Servers: healthy()}
	for _, s := range r.Servers {
		i := s.Hosts[0].Instances[0]
		i.position, i.Position, i.System = pgsplit.LSN(0x1A3B004510), "1A/3B004510", "7713771405047790123"
		i.Lag = &lag{Bytes: 1234, Millis: 12, Proven: true}
	}
	r.Servers[1].Hosts[0].Instances[0].Feedback = false
	r.Servers[2].Hosts[0].Instances[0].Feedback = false
	r.Servers[2].Name = "c.example:5432"
	r.Findings = diagnose(r.Servers)
	inTable := func(text string) bool { return strings.HasPrefix(text, "server ") }
	text := r.text(100)
	if !inTable(text) || !strings.Contains(text, "b:5432, c.example:5432") {
		t.Errorf("no table, or a finding of two servers is there twice:\n%s", text)
	}
	narrow := r.text(60)
	if inTable(narrow) || !strings.Contains(narrow, "  behind     1234 B, ≤12 ms\n") {
		t.Errorf("no blocks at 60 columns:\n%s", narrow)
	}
	r.Servers[1].Name = strings.Repeat("long-", 12) + "name"
	if long := r.text(100); inTable(long) {
		t.Errorf("a table with a long name:\n%s", long)
	}
	for width, text := range map[int]string{100: text, 60: narrow} {
		for line := range strings.Lines(text) {
			if n := len([]rune(strings.TrimRight(line, "\n"))); n > width {
				t.Errorf("%d columns of %d: %s", n, width, line)
			}
		}
	}
	r.Servers[1].Hosts[0].Instances[0].System = "8"
	if columns := r.rows()[0]; !slices.Contains(columns, "system identifier") {
		t.Errorf("two clusters, and the columns are %q", columns)
	}
}
