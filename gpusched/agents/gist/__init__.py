"""GIST (Narantuya et al., "Multi-Agent Deep Reinforcement Learning-Based Resource Allocation in HPC/AI Converged
Cluster", CMC 2022): as published, and extended to partitions of any size.

In: a partition's queue and nodes. Out: jobs started and their nodes. Begin with `decide` (the pass), `live` and
`replay` (its callers), `train` and `scale` (training); `section6`, `expectimax`, `reproduce` are the paper's setting.
"""  # noqa: D205
