"""MIG slices in decisions: a snapshot split into whole GPUs and slices, and which GPUs to cut on demand.

In: snapshots whose nodes have slices. Out: the same as nodes and partitions of their own, which every pass, agent and
forecast can decide on; plans with the nodes' own names again. Pure. Begin with `split`; `tree` searches for placements
of slices on a GPU, and `plan` says what to cut and what to make whole.
"""
