// Command pgsplit shows what the driver of the same name does.
//
//	pgsplit demo    a cluster with two replicas, and where each statement goes while they lag
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
)

const usage = `usage: pgsplit demo [-once] [-pause duration]

demo starts a PostgreSQL primary with two streaming replicas in a temporary folder and shows,
statement by statement, which server answers and why, while the replicas are paused and resumed.
It ends with Ctrl-C and leaves nothing behind.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, out, errs io.Writer) int {
	if len(args) == 0 || args[0] != "demo" {
		fmt.Fprint(errs, usage)
		return 2
	}
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(errs)
	flags.Usage = func() { fmt.Fprint(errs, usage) }
	once := flags.Bool("once", false, "end after one round")
	pause := flags.Duration("pause", defaultPause, "between two statements")
	switch err := flags.Parse(args[1:]); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	case flags.NArg() > 0:
		fmt.Fprint(errs, usage)
		return 2
	}
	if err := demo(ctx, out, *once, *pause); err != nil && ctx.Err() == nil {
		fmt.Fprintln(errs, err)
		return 1
	}
	return 0
}
