"""Implement the commands, without parsing and printing.

In: what was asked, the store (read-only), nodes for logs and exec. Out: command files in the inbox; values for views.
May import: nightly, agents, study, sim, forecast, cluster, promotion, accounting, traces, sched, queue, nodes, config,
model. Begin with `request`, the table of options, and `submit`, then `why`.
"""
