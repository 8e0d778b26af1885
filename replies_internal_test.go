package pgsplit

import (
	"context"
	"testing"
	"time"
)

// A read inside a transaction stays where it is, however late its reply: nobody looks for it again and again.
func TestALateReplyToWhatCannotMoveIsNotLookedForAgain(t *testing.T) {
	config, err := ParseDSN("postgres://127.0.0.1:1/shop?replica=127.0.0.1:2")
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	shell, err := c.Connect(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer shell.Close()
	s := c.replicas[0]
	p := &physical{server: s}
	p.reply.probed, p.reply.due = present(), present()
	p.reply.patience, p.reply.whole = time.Hour, true
	s.mu.Lock()
	s.conns[p] = struct{}{}
	s.mu.Unlock()
	s.lookForReplies()
	p.reply.mu.Lock()
	if p.reply.due != 0 {
		t.Error("it is due again at once")
	}
	p.reply.mu.Unlock()
	s.mu.Lock()
	delete(s.conns, p)
	s.mu.Unlock()
}
