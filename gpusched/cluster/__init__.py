"""The port to the nodes (`base.Cluster`) and what is behind it (`ssh.SshCluster`).

In: nodes to observe, operations to perform. Out: observations, outcomes. May import: nodes, queue, config, model. Begin
with `base`, then `ssh`.
"""
