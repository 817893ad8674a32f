"""The controller: one cycle (apply commands, observe, record, decide, check, launch), run in a loop or once.

In: the inbox, the cluster's observations, inventory and policies. Out: events and jobs in the store, operations on
nodes. May import: views, cluster, promotion, forecast, traces, sched, accounting, queue, nodes, config, model. Begin
with `service` (the loop) and `cycle.Cycle`. The path of a job: `commandfiles` (into the store), `planning` (snapshot,
`deciding`, check, recorded intent), `launcher` (operations, performed by the package cluster through scripts of the
package nodes), `reconcile` (its next step, pure), `completing` (a job that ends), `escalating` (kill, then remove),
`cleanup` (leftovers). `nodestate` and `health` judge nodes and GPUs by their readings. `logsetup` writes the log.
"""
