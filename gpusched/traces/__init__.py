"""Workloads: read, filtered, scaled, described or generated; a `trace.Trace` is columns of jobs.

In: files of public formats, our own store, Slurm's accounting, descriptions. Out: `Trace`. May import: queue, slurm,
config, model. Begin with `trace`, then `load`; a format is one module in `readers`; the own history is chosen in `own`.
"""
