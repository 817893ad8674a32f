"""The controller: one cycle (observe, decide, check, apply, record), run for ever or once.

In: the inbox, the cluster's observations, inventory and policies. Out: events and jobs in the store, operations on
nodes. May import: cluster, promotion, forecast, traces, sched, accounting, queue, nodes, config, model. Begin with
`cycle.Cycle`, then `fold` (commands into the store), `reconcile` (a job's next step, pure), `completing` (of one that
ends), `escalating` (how hard), `tidy` (what is left on nodes), `service` (the loop).
"""
