"""Topology-aware placement by several schedulers: our setting after Zhao and Wu (TNSM 2022), and baselines.

In: topologies, kinds of jobs, seeds. Out: JCT by policy (`reproduce`). May import: agents.common and what stands below
agents. Begin with `workloads`, then `reproduce`.
"""
