"""DL2 (Peng et al., "DL2: A Deep Learning-Driven Scheduler for Deep Learning Clusters", IEEE TPDS 32(8), 2021): its
agent, its public setting, exactly, with the rules it is compared with, and the same agent for clusters of our own.

In: workloads and measured speeds, or a partition's recorded jobs. Out: sizes, weights, JCTs and makespans. Begin
with `decide` (what the agent sees and does) and `slots` (the public setting); `observed` is what it knows of
speeds, `agent` plays it there, `learn` trains it, `rules` are the others, `speeds` and `workloads` read and draw what
goes in, `reproduce` makes the table. `live` chooses sizes in our clusters, `cluster` is where it learns that, `train`
how. May import: sim, traces, sched.
"""  # noqa: D205
