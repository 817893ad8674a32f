"""DL2 (Peng et al., "DL2: A Deep Learning-Driven Scheduler for Deep Learning Clusters", IEEE TPDS 32(8), 2021): its
agent, its public setting, exactly, with the rules it is compared with, and the same agent for real clusters.

In: workloads and measured speeds, or a partition's recorded jobs. Out: sizes, weights, JCTs and makespans. Begin
with `decide` (observation and decision) and `slots` (the public setting). `observed` holds observed speeds, `agent`
simulates the agent in the public setting, `learn` trains it, `rules` has the baselines, `workloads` reads and draws
inputs, `reproduce` makes the table. `live` chooses sizes in our clusters, `train` trains for them. May import: sim,
traces, sched.
"""  # noqa: D205
