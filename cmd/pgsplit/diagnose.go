package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// finding is something that the operator should know.
type finding struct {
	Name     string   `json:"name"`
	Severity severity `json:"severity"`
	Server   string   `json:"server"`
	Message  string   `json:"message"`
	Remedy   string   `json:"remedy"`
}

type severity string

const (
	severityError   severity = "error"   // it does not do what it is configured for
	severityWarning severity = "warning" // it does, at a price or with a risk
	severityNote    severity = "note"    // good to know
)

// rank orders severities, the worst first. It is what the exit status is made of.
func (s severity) rank() int {
	return slices.Index([]severity{severityError, severityWarning, severityNote}, s)
}

// negligible is how many bytes of WAL a replica can be behind without a cause: F19, a quiet primary may hold back its
// last commit for seconds.
const negligible = 64 << 10

// diagnosis collects findings.
type diagnosis struct {
	servers  []server
	primary  *instance // the one that the driver would write to; nil if there is none
	findings []finding
}

// diagnose says what is wrong, the worst first. The first server is the primary.
func diagnose(servers []server) []finding {
	d := &diagnosis{servers: servers, findings: []finding{}}
	for _, i := range servers[0].used() {
		if !i.standby() {
			d.primary = i
		}
	}
	if len(servers) == 1 {
		d.add(severityNote, "no-replicas", "",
			"No replica is configured, or the only one is the primary's own address: every read runs on the primary.",
			"Name replicas in the DSN, or in DATABASE_RO_URL.")
	}
	for n := range servers {
		s := &servers[n]
		d.hosts(s)
		d.roles(s)
		d.attrs(s)
		for _, h := range s.Hosts {
			for _, i := range h.Instances {
				d.instance(s, h, i)
			}
		}
	}
	d.twice()
	slices.SortStableFunc(d.findings, func(a, b finding) int { return a.Severity.rank() - b.Severity.rank() })
	return d.findings
}

func (d *diagnosis) add(sev severity, name, server, message, remedy string) {
	d.findings = append(d.findings, finding{Name: name, Severity: sev, Server: server, Message: message, Remedy: remedy})
}

// hosts looks at the addresses that do not answer, or not always.
func (d *diagnosis) hosts(s *server) {
	answered := slices.ContainsFunc(s.Hosts, func(h *host) bool { return len(h.Instances) > 0 })
	for _, h := range s.Hosts {
		label := s.label(h, nil)
		sev := severityError
		if answered {
			sev = severityWarning
		}
		switch {
		case h.Failed == 0:
		case len(h.Instances) > 0:
			if h.Code != "53300" { // our own connections may have been the last ones
				d.add(severityWarning, "unreachable", label,
					fmt.Sprintf("%d of %d connections failed: %s.", h.Failed, h.Attempts, h.Cause),
					"Something behind this address is down: take it out of the name or the balancer, or bring it back.")
			}
		case h.Code == "57P03" && hotStandbyOff(h):
			d.add(sev, "hot-standby-off", label, "It is a standby that lets nobody in: "+h.said()+".",
				"Set hot_standby = on there and restart it.")
		case h.Code == "57P03":
			if s.Role == roleReplica {
				sev = severityWarning
			}
			d.add(sev, "starting-up", label, "It does not accept connections yet, or no more: "+h.said()+".",
				"Wait for it and check again. PostgreSQL 13 says the same when hot_standby is off.")
		default:
			d.add(sev, "unreachable", label, "No connection: "+h.said()+".", unreachableRemedy(h))
		}
	}
}

func (h *host) said() string {
	if h.Detail == "" {
		return strings.TrimSuffix(h.Cause, ".")
	}
	return h.Cause + " (" + strings.TrimSuffix(h.Detail, ".") + ")"
}

// hotStandbyOff goes by what the server says. A translated server says it in the message that has no other meaning.
func hotStandbyOff(h *host) bool {
	return strings.Contains(h.Detail, "Hot standby mode is disabled") ||
		h.Detail == "" && strings.Contains(h.Cause, "not accepting connections")
}

func unreachableRemedy(h *host) string {
	switch {
	case strings.HasPrefix(h.Address, hidden):
		return "The password holds an @: write it as %40."
	case strings.HasPrefix(h.Code, "28"):
		return "Correct user, password, certificate or pg_hba.conf."
	case h.Code == "3D000":
		return "Create the database, or correct its name in the DSN."
	case h.Code == "53300":
		return "Raise max_connections there, or lower the pools that use it."
	}
	return "See that it runs, and that name, port, firewall and listen_addresses are right."
}

// roles looks whether the servers are what they are configured as.
func (d *diagnosis) roles(s *server) {
	used := s.used()
	var standbys, primaries []string
	for _, h := range s.Hosts {
		for _, i := range h.Instances {
			if inUse := slices.Contains(used, i); i.standby() && (inUse || len(used) == 0) {
				standbys = append(standbys, s.label(h, i))
			} else if !i.standby() && (inUse || len(used) == 0 || s.Role == rolePrimary) {
				primaries = append(primaries, s.label(h, i))
			}
		}
	}
	switch {
	case s.Role == rolePrimary && len(standbys) > 0:
		d.add(severityError, "primary-is-replica", strings.Join(standbys, ", "),
			"It is configured as the primary and is in recovery: writes that are led there fail.",
			"Name the primary's address, or all hosts in one URI: postgres://a,b/db finds the primary among them.")
	case s.Role == rolePrimary && len(primaries) > 1:
		d.add(severityError, "two-primaries", strings.Join(primaries, ", "),
			"Both accept writes: a failover left the old primary running. The driver uses the higher timeline; others may not.",
			"Stop the one with the lower timeline before more is written there.")
	case s.Role == roleReplica && len(primaries) > 0:
		d.add(severityError, "replica-is-primary", strings.Join(primaries, ", "),
			"It is configured as a replica and is not in recovery: it was promoted, or the address leads to the primary.",
			"After a failover make it the primary in the DSN, or follow the new primary with it; otherwise correct the address.")
	}
}

// attrs looks at target_session_attrs that let the wrong server in.
func (d *diagnosis) attrs(s *server) {
	switch {
	case s.Role == rolePrimary && s.Attrs == "any" && len(s.Hosts) > 1:
		d.add(severityWarning, "target-session-attrs-inherited", s.Name,
			"target_session_attrs=any among several hosts (from the DSN, a service file or PGTARGETSESSIONATTRS): "+
				"the first that answers gets the writes, a standby too.",
			"Leave it out, or write target_session_attrs=primary.")
	case s.Role == roleReplica && s.Attrs == "read-only":
		d.add(severityWarning, "target-session-attrs-inherited", s.Name,
			"target_session_attrs=read-only keeps no primary out: the driver's sessions here are read only by themselves.",
			"Write target_session_attrs=standby on this replica.")
	}
}

// instance looks at one instance by itself and against the primary.
func (d *diagnosis) instance(s *server, h *host, i *instance) {
	label := s.label(h, i)
	d.cluster(s, label, i)
	d.session(s, label, i)
	d.privileges(s, label, i)
	if s.Role == rolePrimary && !i.standby() && i.RefusesWrite {
		d.add(severityError, "primary-read-only", label,
			"default_transaction_read_only is on for this role, database or server: every write fails.",
			"Find it in pg_db_role_setting or postgresql.conf, and turn it off for the role that the program uses.")
	}
	if s.Role == roleReplica && i.standby() {
		d.replay(label, i)
		d.slot(label, i)
		d.conflicts(label, i)
	}
}

// cluster looks whether the instance belongs to the primary's cluster.
func (d *diagnosis) cluster(s *server, label string, i *instance) {
	than := d.reference()
	if than == nil || than == i {
		return
	}
	versions := fmt.Sprintf("It runs PostgreSQL %s and the primary %s.", i.Version, than.Version)
	if i.major() != than.major() {
		d.add(severityWarning, "version-skew", label, versions,
			"A streaming replica has its primary's major version: see that this is the server you mean.")
	} else if i.num != than.num {
		d.add(severityNote, "version-skew", label, versions,
			"Bring both to the same minor version when you can.")
	}
	timelines := ""
	if d.primary != nil {
		timelines = fmt.Sprintf("It follows timeline %d, the primary writes %d", i.Timeline, d.primary.Timeline)
	}
	switch {
	case i.System != "" && than.System != "" && i.System != than.System:
		d.add(severityError, "other-cluster", label,
			fmt.Sprintf("Its system identifier is %s, the primary's is %s: it holds other data.", i.System, than.System),
			"Correct the address, or set this replica up anew from the primary.")
	case d.primary == nil || !i.standby() || i.Timeline == 0 || d.primary.Timeline == 0 || i.Timeline == d.primary.Timeline:
	case i.Timeline > d.primary.Timeline:
		d.add(severityError, "other-timeline", label,
			timelines+": another server was promoted, and this primary is the old one.",
			"Find the new primary and put it into the DSN.")
	case i.Receiving && i.SeesOthers:
		d.add(severityError, "other-timeline", label,
			timelines+": it still follows the old primary.",
			"Point its primary_conninfo at the new primary; use pg_rewind if it has gone on after the failover.")
	default:
		d.add(severityWarning, "other-timeline", label,
			timelines+", as far as can be seen.",
			"See that it follows the new primary. A replica that streams tells for certain, to a role with pg_monitor; "+
				"otherwise it is known at its next restartpoint.")
	}
}

// reference is what the others are compared with.
func (d *diagnosis) reference() *instance {
	if d.primary != nil {
		return d.primary
	}
	for n := range d.servers {
		for _, i := range d.servers[n].used() {
			return i
		}
	}
	return nil
}

// session looks at what stands between the driver and the server.
func (d *diagnosis) session(s *server, label string, i *instance) {
	switch {
	case i.ReadOnly == readOnlyRefused:
		d.add(severityWarning, "pooler-drops-read-only", label,
			"What answers here refuses the startup parameter default_transaction_read_only. "+eachItsOwn, poolerRemedy)
	case i.ReadOnly == readOnlyDropped:
		d.add(severityWarning, "pooler-drops-read-only", label,
			"The startup parameter default_transaction_read_only does not arrive, or does not hold. "+eachItsOwn, poolerRemedy)
	case i.Pooled:
		d.add(severityNote, "pooler", label,
			"A pooler answers here: read only and floors are ensured inside a transaction for each statement.",
			"Let the driver connect directly where round trips matter; it keeps a pool itself.")
	}
}

const eachItsOwn = "ReadOnly statements get a read-only transaction each, which costs round trips."

const poolerRemedy = "Connect directly; or use PgBouncer 1.26 or later, which passes it on; or, from 1.20, " +
	"track_extra_parameters = IntervalStyle, default_transaction_read_only."

// privileges looks at what the role may not do, and what becomes of it.
func (d *diagnosis) privileges(s *server, label string, i *instance) {
	var essential, writes, others []string
	for _, name := range i.Missing {
		switch name {
		case "pg_replication_slots", "pg_stat_replication", "pg_stat_activity":
			others = append(others, name)
		case "pg_logical_emit_message", "pg_current_wal_insert_lsn", "pg_current_wal_flush_lsn":
			writes = append(writes, name)
		default:
			essential = append(essential, name)
		}
	}
	if len(essential) > 0 {
		consequence := "the driver cannot tell who answers, and uses no replica without that"
		if s.Role == rolePrimary {
			consequence = "the driver cannot tell who answers, and proves no floor with it"
		}
		d.add(severityError, "no-privilege", label,
			fmt.Sprintf("The role may not use %s: %s.", strings.Join(essential, ", "), consequence),
			"Grant them back to PUBLIC, or to the role.")
	}
	if len(writes) > 0 && s.Role == rolePrimary {
		d.add(severityWarning, "no-privilege", label,
			fmt.Sprintf("The role may not execute %s: positions of writes stay unknown, and sessions read from the primary.",
				strings.Join(writes, ", ")),
			"Grant execute on them to the role.")
	}
	if !i.SeesOthers {
		others = append(others, "pg_read_all_stats")
	}
	if len(others) > 0 {
		consequence := "this check cannot see other sessions"
		if i.standby() {
			consequence = "after a failover the replica's timeline is known late, at its next restartpoint"
		}
		d.add(severityNote, "no-privilege", label,
			fmt.Sprintf("The role lacks %s: %s.", strings.Join(others, ", "), consequence),
			"Grant pg_monitor to the role, if you may.")
	}
}

// replay looks whether a standby follows.
func (d *diagnosis) replay(label string, i *instance) {
	behind := ""
	if i.Lag != nil && !i.Lag.Proven {
		behind = fmt.Sprintf(" It is %s behind.", bytesText(i.Lag.Left))
	}
	switch {
	case i.Paused:
		d.add(severityWarning, "lagging", label,
			"Replay is paused: reads here get staler, and those with a floor go elsewhere."+behind,
			"select pg_wal_replay_resume() there.")
	case !i.Receiving && !i.HasArchive:
		d.add(severityWarning, "lagging", label, "It receives no WAL: there is no connection to its primary."+behind,
			"See its log, and primary_conninfo; its primary may be down.")
	case behind != "" && i.Lag.Left > negligible:
		d.add(severityWarning, "lagging", label,
			fmt.Sprintf("It did not reach within %s where the primary was.%s", time.Duration(i.Lag.Millis)*time.Millisecond, behind),
			"Reads with a floor go elsewhere meanwhile. See its disk, long queries in the way of replay, and the network.")
	case behind != "":
		d.add(severityNote, "lagging", label,
			fmt.Sprintf("It did not reach within %s where the primary was.%s", time.Duration(i.Lag.Millis)*time.Millisecond, behind),
			"So little can wait for a quiet primary's next WAL. Check again.")
	}
}

// slot looks whether the primary keeps WAL for a standby that is away.
func (d *diagnosis) slot(label string, i *instance) {
	switch {
	case i.Slot != "" && !i.Receiving && d.primary != nil && !slices.Contains(d.primary.Missing, "pg_replication_slots") &&
		!slices.Contains(d.primary.Slots, i.Slot):
		d.add(severityError, "slot-missing", label,
			fmt.Sprintf("It asks for the replication slot %q, which the primary does not have, and receives nothing.", i.Slot),
			fmt.Sprintf("select pg_create_physical_replication_slot('%s') on the primary.", strings.ReplaceAll(i.Slot, "'", "''")))
	case i.Slot != "":
	case i.HasArchive:
		d.add(severityNote, "slot-missing", label, "It streams without a replication slot; it has a restore_command to fall back to.", "")
	case d.primary != nil && d.primary.KeepMB == 0:
		d.add(severityWarning, "slot-missing", label,
			"It streams without a replication slot, and wal_keep_size is 0: after a short time away it cannot catch up "+
				"and must be set up anew.",
			"Create a slot on the primary and name it in primary_slot_name, or set wal_keep_size.")
	default:
		keep := "only as much WAL as wal_keep_size says"
		if d.primary != nil {
			keep = fmt.Sprintf("%d MB of WAL (wal_keep_size)", d.primary.KeepMB)
		}
		d.add(severityNote, "slot-missing", label, "It streams without a replication slot: the primary keeps "+keep+" for the time it is away.",
			"Create a slot and name it in primary_slot_name if that is not enough.")
	}
}

// soon is a max_standby_streaming_delay, or max_standby_archive_delay, below which ordinary reads get cancelled.
const soon = 5 * time.Second

// conflicts looks at when replay cancels reads.
func (d *diagnosis) conflicts(label string, i *instance) {
	milliseconds, setting, while := i.CancelAfter, "max_standby_streaming_delay", ""
	if archive := i.FromArchive; i.HasArchive && archive >= 0 && (milliseconds < 0 || archive < milliseconds) {
		milliseconds, setting, while = archive, "max_standby_archive_delay", ", while it replays from the archive"
	}
	delay := time.Duration(milliseconds) * time.Millisecond
	if i.Feedback || delay < 0 {
		return
	}
	sev, when := severityNote, fmt.Sprintf("once replay has waited %s for them", delay)
	if delay < soon {
		sev = severityWarning
	}
	if delay == 0 {
		when = "at once"
	}
	d.add(sev, "conflicts-cancel-reads", label,
		"hot_standby_feedback is off: reads that need rows which the primary has vacuumed are cancelled "+when+while+
			". The driver moves them on only before their first row, and not inside a transaction.",
		"Set hot_standby_feedback = on there, or raise "+setting+".")
}

// twice looks for one instance under several servers. Instances that a server would not use do not count.
func (d *diagnosis) twice() {
	names := map[string][]string{}
	primary := map[string]bool{}
	var order []string
	for n := range d.servers {
		s := &d.servers[n]
		for _, i := range s.used() {
			if len(names[i.id]) == 0 {
				order = append(order, i.id)
			}
			names[i.id] = append(names[i.id], s.label(s.usedHost(), i))
			primary[i.id] = primary[i.id] || s.Role == rolePrimary
		}
	}
	for _, id := range order {
		if len(names[id]) < 2 {
			continue
		}
		sev := severityWarning
		message := "They are one and the same instance: it gets a double share of the reads, and there is a replica less than it seems."
		if primary[id] {
			sev = severityError
			message = "They are one and the same instance, as primary and as replica: reads do not leave the server of the writes."
		}
		d.add(sev, "same-address-twice", strings.Join(names[id], ", "), message,
			"Keep one of the names, and correct or drop the other.")
	}
}

func bytesText(n uint64) string {
	units := []string{"B", "kB", "MB", "GB", "TB"}
	u := 0
	for ; n >= 10*1024 && u < len(units)-1; u++ {
		n /= 1024
	}
	return fmt.Sprintf("%d %s", n, units[u])
}
