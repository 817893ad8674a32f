"""The interface to the nodes (`base.ClusterBackend`) and its implementation over SSH (`ssh.SshCluster`).

In: nodes to observe, operations to perform. Out: observations, outcomes. May import: nodes, queue, config, model. Begin
with `base`, then `ssh`.
"""
