"""Readers of recorded workloads, one module per format (two in `slurm_like`): ``read(source, strict) -> Trace``.

In: files as they were published. Out: a `Trace`, with bad rows kept out and named by line. Begin with `draft`.
"""
