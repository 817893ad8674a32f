"""The cost of a placement: links that jobs share, and node selection by it.

In: how nodes are connected (`tree.Tree`), what kinds of jobs send over links (`slowdown.Model`), where jobs run
(`load.Load`). Out: how much slower a job is somewhere, and where it would be least. May import: compiled, model, the
arrays of `sched`, interference. Begin with `slowdown`; `live` makes all of it from a snapshot, `queue` decides by it.
"""
