"""What learned systems share: small networks, batches of clusters, checkpoints, the training data and request.

In: traces, nodes, settings of a policy file. Out: arrays for compiled passes, `Material` to learn from. May import:
study, sim, traces, sched; never one agent. Begin with `request`, then `data`.
"""
