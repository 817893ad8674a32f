"""The one walk over a queue (`queue_pass`), its rule-based hooks (`by_rule`), and GPU sharing (`beside`).

In: the partition's state as arrays, its queue, hooks. Out: the same arrays changed, and the head of the queue.
May import: the rest of `sched` but its other subpackages.
"""
