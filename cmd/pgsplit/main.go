// Command pgsplit shows what the driver of the same name does, and what it finds.
//
//	pgsplit demo     a cluster with two replicas, and where each statement goes while they lag
//	pgsplit check    what is wrong with a primary and its replicas, before a program finds out
//	pgsplit watch    the same servers live
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const usage = `usage: pgsplit demo [-http address] [-once] [-pause duration]
       pgsplit check [-json] [-timeout duration] [DSN]
       pgsplit watch [-interval duration] [-timeout duration] [-once] [-debug-url url] [DSN]

demo starts a PostgreSQL primary with two streaming replicas in a temporary folder and shows,
statement by statement, which server answers and why, while the replicas are paused and resumed.
On a page whose address it prints, you pause and resume them yourself, write notes and see who
shows them. It ends with Ctrl-C and leaves nothing behind.
  -http address       where it serves its pages (default 127.0.0.1:0, any free port); "" for none
  -once               end after one round
  -pause duration     between two statements (default 400ms)

check connects to every server of a DSN as the driver does, and says who answers, how far each
replica is behind, and what is wrong. It changes nothing there. Without a DSN it takes the
environment, as ConfigFromEnv("") does: DATABASE_URL, DATABASE_RO_URL and so on.
  -json               one document in place of the table
  -timeout duration   for each server, all of which are asked at once (default 5s)
Exit status: 0 nothing worse than a note, 1 warnings, 2 errors or an unusable DSN.

watch shows the same live, drawn in place: each server's state, position and lag, a graph of the
last minute, and the names of what is wrong; appended lines where standard output is no terminal.
It ends with Ctrl-C.
  -interval duration  between two looks (default 1s)
  -timeout duration   for each server (default 1s)
  -once               look once, draw and end
  -debug-url url      the debug page of a program: its decisions per second, by reason
Exit status: 0, or 2 for an unusable DSN.

Wrong usage is exit status 2.
`

// defaultTimeout is how long check waits for a server.
const defaultTimeout = 5 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, out, errs io.Writer) int {
	if len(args) == 0 {
		return misused(errs, "it takes a command")
	}
	switch args[0] {
	case "demo":
		return runDemo(ctx, args[1:], out, errs)
	case "check":
		return runCheck(ctx, args[1:], out, errs)
	case "watch":
		return runWatch(ctx, args[1:], out, errs)
	case "help", "-h", "-help", "--help":
		fmt.Fprint(out, usage)
		return 0
	}
	return misused(errs, "there is no such command")
}

func runDemo(ctx context.Context, args []string, out, errs io.Writer) int {
	flags := newFlags("demo")
	address := flags.String("http", defaultHTTP, "")
	once := flags.Bool("once", false, "end after one round")
	pause := flags.Duration("pause", defaultPause, "between two statements")
	if rest, status, ok := parse(flags, args, out, errs); !ok {
		return status
	} else if len(rest) > 0 {
		return misused(errs, "demo takes flags and nothing else")
	}
	if err := demo(ctx, out, *address, *once, *pause); err != nil && ctx.Err() == nil {
		fmt.Fprintln(errs, err)
		return 1
	}
	return 0
}

func runCheck(ctx context.Context, args []string, out, errs io.Writer) int {
	flags := newFlags("check")
	asJSON := flags.Bool("json", false, "")
	timeout := flags.Duration("timeout", defaultTimeout, "")
	dsn, status, ok := parse(flags, args, out, errs)
	if !ok {
		return status
	}
	if *timeout <= 0 {
		return misused(errs, "check's -timeout must be above 0")
	}
	return check(ctx, out, dsn, *asJSON, *timeout)
}

func runWatch(ctx context.Context, args []string, out, errs io.Writer) int {
	flags := newFlags("watch")
	interval := flags.Duration("interval", defaultInterval, "")
	timeout := flags.Duration("timeout", defaultWatchTimeout, "")
	once := flags.Bool("once", false, "")
	page := flags.String("debug-url", "", "")
	dsn, status, ok := parse(flags, args, out, errs)
	if !ok {
		return status
	}
	if *interval <= 0 || *timeout <= 0 {
		return misused(errs, "watch's -interval and -timeout must be above 0")
	}
	config, err := configOf(dsn)
	if err != nil {
		fmt.Fprintln(errs, err) // it quotes nothing of the DSN
		return statusErrors
	}
	w := &watcher{out: out, terminal: isTerminal(out), page: *page, timeout: *timeout,
		survey: newSurvey(config, *timeout, min(watchWait, *timeout))}
	watch(ctx, w, *interval, *once)
	return 0
}

// newFlags makes a set of flags that prints nothing by itself: its errors quote arguments, and those can hold a password.
func newFlags(name string) *flag.FlagSet {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	return flags
}

// parse takes flags before, between and behind the other arguments, which it returns.
func parse(flags *flag.FlagSet, args []string, out, errs io.Writer) (rest []string, status int, ok bool) {
	for {
		switch err := flags.Parse(args); {
		case errors.Is(err, flag.ErrHelp):
			fmt.Fprint(out, usage)
			return nil, 0, false
		case err != nil:
			return nil, misused(errs, flags.Name()+" has no such flag, or the flag takes another value"), false
		case flags.NArg() == 0:
			return rest, 0, true
		}
		rest = append(rest, flags.Arg(0))
		args = flags.Args()[1:]
	}
}

// misused says last what is wrong, where a terminal shows it. It quotes no argument: one can hold a password.
func misused(errs io.Writer, why string) int {
	fmt.Fprintf(errs, "%s\npgsplit: %s\n", usage, why)
	return 2
}
