"""Assignment of pending jobs to nodes and GPU types, decided for all of them at once.

In: arrays of jobs and nodes. Out: arrays; pure. `greedy` answers at once; `milp` (HiGHS, the extra ``milp``) begins
with that answer and improves it within its budget. Begin with `queue.map_queue`, then `problem`.
"""
