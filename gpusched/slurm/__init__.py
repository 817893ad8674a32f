"""Adapter to Slurm's commands: reads jobs, nodes and partitions, and sends updates.

In: the output of squeue, scontrol and sacct on this machine. Out: the types of `gpusched.model.slurm`; `NoAnswer` when
Slurm does not respond. May import: model. Begin with `commands`.
"""
