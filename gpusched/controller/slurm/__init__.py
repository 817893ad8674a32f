"""The cycle beside Slurm: its jobs are mirrored into the store, and plans become requests to it.

In: what `gpusched.slurm` reads, and the readings of nodes. Out: jobs, node records, events, runs and usage in the
store, as of jobs of ours. May import: what `gpusched.controller` may. Begin with `cycle.SlurmCycle`, then `mirror`.
"""
