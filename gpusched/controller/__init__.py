"""The controller: one cycle (take commands, observe, record, decide, check, apply), run for ever or once.

In: the inbox, the cluster's observations, inventory and policies. Out: events and jobs in the store, operations on
nodes. May import: cluster, promotion, forecast, traces, sched, accounting, queue, nodes, config, model. Begin with
`service` (the loop) and `cycle.Cycle`. A job's way: `fold` (commands into the store), `planning` (snapshot, `deciding`,
check, the recorded intent), `launcher` (operations, which the room cluster carries out by scripts of the room nodes),
`reconcile` (its next step, pure), `completing` (of one that ends), `escalating` (how hard), `tidy` (leftovers).
"""
