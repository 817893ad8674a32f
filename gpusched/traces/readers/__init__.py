"""One module per format of recorded workloads, each with ``read(source, strict) -> Trace``.

In: files as they were published. Out: a `Trace`, with bad rows kept out and named by line. Begin with `draft`.
"""
