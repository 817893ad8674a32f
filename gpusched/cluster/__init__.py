"""The worlds a decision can be applied to. Each is a `base.Cluster`.

In: nodes to observe, operations to perform. Out: observations, outcomes. May import: nodes, queue, config, model. Begin
with `base`, then `ssh`.
"""
