"""The cycle beside Slurm: its jobs are mirrored into the store, and plans become requests to Slurm.

In: what `gpusched.slurm` reads, and the readings of nodes. Out: jobs, node records, events, runs and usage in the
store, as for jobs of our own. May import: what `gpusched.controller` may. Begin with `cycle.SlurmCycle`, then `mirror`.
"""
