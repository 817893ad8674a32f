"""The formats of recorded workloads, a module each (two in `slurm_like`), with ``read(source, strict) -> Trace``.

In: files as they were published. Out: a `Trace`, with bad rows kept out and named by line. Begin with `draft`.
"""
