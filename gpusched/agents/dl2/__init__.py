"""DL2 (Peng et al., "DL2: A Deep Learning-Driven Scheduler for Deep Learning Clusters", IEEE TPDS 32(8), 2021): its
public setting, exactly, with the rules it is compared with. The agent itself is still to come.

In: workloads and measured speeds. Out: mean JCT and makespan of a policy. Begin with `slots` (the setting) and `rules`
(who gets how much); `speeds` and `workloads` read and draw what goes in, `reproduce` makes the table. May import: sim,
traces.
"""  # noqa: D205
