// Command worker is one process of a soak's generators: see package soak, which starts it.
package main

import (
	"fmt"
	"os"

	"github.com/pgsplit/pgsplit/integration/soak"
)

func main() {
	if !soak.IsWorker() {
		fmt.Fprintln(os.Stderr, "worker: this is a part of a soak, which starts it: see make soak")
		os.Exit(2)
	}
	if err := soak.Work(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}
