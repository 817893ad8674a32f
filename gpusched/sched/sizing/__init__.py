"""GPU counts for a partition's resizable jobs.

In: a snapshot (`live`), or a replay's arrays (`gpusched.sim.engine.sized`). Out: sizes of jobs that wait, and resizes
of jobs that run. Both fill a `question.Scene`; what follows is the same compiled code: who is admitted and which sizes
the brakes allow (`settle.gather`), whose wish counts (`rules`, or an agent's `choose_sizes`), and what of it is done
(`settle.settle`). Begin with `question`, then `live.sizes_of`.
"""
