"""GIST (Narantuya et al., "Multi-Agent Deep Reinforcement Learning-Based Resource Allocation in HPC/AI Converged
Cluster", CMC 2022): as published, and made useful for partitions of any size.

In: a partition's queue and nodes. Out: who starts where. Begin with `decide` (the pass), `live` and `replay` (who
call it), `train` and `scale` (how it learns); `section6`, `expectimax`, `reproduce` are the paper's own setting.
"""  # noqa: D205
