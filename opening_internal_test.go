package pgsplit

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// A connection on its way whose place is needed for another one is there nevertheless where a hook does not look at its
// context. It does not stay open with nobody to use it.
func TestAConnectionThatComesAfterItsPlaceWasTakenIsNotLost(t *testing.T) {
	config, err := ParseDSN(pgsplittest.Start(t, pgsplittest.Replicas(0)).DSN())
	if err != nil {
		t.Fatal(err)
	}
	begun, goOn := make(chan struct{}), make(chan struct{})
	config.Primary.MaxConns = 1
	config.Primary.AfterConnect = func(context.Context, *pgx.Conn) error {
		begun <- struct{}{}
		<-goOn
		return nil
	}
	c, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	shell, err := c.Connect(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer shell.Close()
	s := c.primary
	leaving, leave := context.WithCancel(ctx)
	leased := make(chan *physical)
	lease := func(ctx context.Context, a access) {
		p, _ := s.lease(ctx, a, 0)
		leased <- p
	}
	go lease(leaving, readWrite)
	<-begun
	leave()
	<-leased
	go lease(ctx, readOnly)
	<-begun
	goOn <- struct{}{}
	goOn <- struct{}{}
	if p := <-leased; p != nil {
		s.giveBack(p)
	}
	for settled := false; !settled; {
		s.mu.Lock()
		open, idle, total := len(s.conns), len(s.idle[readWrite])+len(s.idle[readOnly]), s.total
		settled = open == 1 && idle == 1 && total == 1
		s.mu.Unlock()
		runtime.Gosched()
		if ctx.Err() != nil {
			t.Fatalf("%d connections are open, %d are idle and %d are counted, of 1", open, idle, total)
		}
	}
}
