"""The one walk over a queue (`queue_pass`), those who decide by a rule in it (`by_rule`), who shares GPUs (`beside`).

In: the partition's state as arrays, its queue, hooks. Out: the same arrays changed, and who is first of those that
wait. May import: the rest of `sched` but its other rooms.
"""
