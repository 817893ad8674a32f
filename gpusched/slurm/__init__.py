"""Slurm's commands: what they say of jobs, nodes and partitions, and what is asked of them.

In: what squeue, scontrol and sacct print on this machine. Out: the words of `gpusched.model.slurm`; `NoAnswer` where
Slurm does not answer. May import: model. Begin with `commands`.
"""
