"""Usage: GPU time, energy and utilization by job, user, node and partition, and allocated but idle GPUs.

In: two readings of a node, or usage rows of the store. Out: usage rows, and the rows of ``gpusched power``. May
import: queue, config, model. Begin with `usage.usage_between`, then `report`.
"""
