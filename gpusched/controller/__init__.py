"""The controller: one cycle (observe, decide, check, apply, record), run for ever or once.

In: the inbox, the cluster's observations, inventory and policies. Out: events and jobs in the store, works on nodes.
May import: cluster, promotion, forecast, sched, accounting, queue, config, model. Begin with `cycle.Cycle`, then
`fold`, `reconcile` (both pure), `service` (the loop).
"""
