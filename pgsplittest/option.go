package pgsplittest

// An Option changes what [Start] and [StartCluster] start.
type Option func(*options)

type options struct {
	replicas int
	binDir   string
	settings []setting
}

// setting is one line of postgresql.conf.
type setting struct {
	name, value       string
	primary, replicas bool // whose file it goes to
}

// Replicas sets the number of streaming replicas. Default 1.
func Replicas(n int) Option {
	return func(o *options) { o.replicas = n }
}

// Setting adds a line to the postgresql.conf of every server. The last setting of a name wins, and all win over those
// of the package.
//
// max_connections, max_worker_processes, max_wal_senders, max_prepared_transactions and max_locks_per_transaction must
// not be lower on a replica than on its primary, nor than initdb's choice (100, 8, 10, 0, 64): such a replica refuses
// to start.
func Setting(name, value string) Option {
	return func(o *options) {
		o.settings = append(o.settings, setting{name: name, value: value, primary: true, replicas: true})
	}
}

// PrimarySetting is [Setting] for the primary alone.
func PrimarySetting(name, value string) Option {
	return func(o *options) {
		o.settings = append(o.settings, setting{name: name, value: value, primary: true})
	}
}

// ReplicaSetting is [Setting] for the replicas alone.
func ReplicaSetting(name, value string) Option {
	return func(o *options) {
		o.settings = append(o.settings, setting{name: name, value: value, replicas: true})
	}
}

// BinDir names the folder that holds initdb and postgres. Default: what [FindBinaries] returns.
func BinDir(dir string) Option {
	return func(o *options) { o.binDir = dir }
}
