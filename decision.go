package pgsplit

import "context"

// decided counts where the call goes and tells OnDecision. It comes once for each server that the call gets to, and once
// for a call that gets to none.
func (c *Conn) decided(ctx context.Context, r Reason, floor LSN) {
	c.connector.reasons[r].Add(1)
	p := c.lease.p
	if p != nil {
		p.server.stats.statements.Add(1)
	}
	hook := c.connector.config.OnDecision
	if hook == nil && (p == nil || !p.server.traced) {
		return
	}
	d := Decision{Reason: r, Floor: floor}
	if p != nil {
		d.Server, d.Role = p.server.name, p.server.role.String()
		if p.inst != nil {
			d.Position = LSN(p.inst.position.Load())
		}
	}
	c.decision = d
	if hook != nil {
		hook(ctx, d)
		c.lease.at = 0 // it takes as long as it likes
	}
}

type decisionKey struct{}

// DecisionFrom is the decision about the statement that runs under ctx, for what pgx calls with the context of a statement:
// the tracers of a pool's ConnConfig.Tracer (QueryTracer, PrepareTracer, ..), for BEGIN, COMMIT and ROLLBACK as well, and for
// the wrappers of Config.WrapConnector.
//
// A context carries it only below the driver, and only for servers with a tracer or a wrapper. It says nothing where no decision has been
// made yet, as in the tracers and hooks of a connection that is being opened or leased, nor for what the driver itself asks
// a server; f of Raw gets no context from the driver.
func DecisionFrom(ctx context.Context) (Decision, bool) {
	d, ok := ctx.Value(decisionKey{}).(*Decision)
	if !ok {
		return Decision{}, false
	}
	return *d, true
}

// telling is ctx with the decision, for those who see it; it costs nothing where nobody does.
func (c *Conn) telling(ctx context.Context) context.Context {
	if !c.lease.p.server.traced {
		return ctx
	}
	d := c.decision
	return context.WithValue(ctx, decisionKey{}, &d)
}
