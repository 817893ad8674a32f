"""The one walk over a queue (`queue_pass`), its rule-based hooks (`by_rule`), and GPU sharing (`beside`).

In: the partition's state as arrays, its queue, hooks. Out: the same arrays changed, and who is first of those that
wait. May import: the rest of `sched` but its other rooms.
"""
