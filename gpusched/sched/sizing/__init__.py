"""GPU counts for a partition's resizable jobs.

In: a snapshot (`live`), or a replay's arrays (`gpusched.sim.engine.sized`). Out: sizes of jobs that wait, and resizes
of jobs that run. Both fill a `question.Scene`; what follows is the same compiled code: the admitted jobs and the sizes
that the brakes allow (`settle.gather`), the wished sizes (`rules`, or an agent's `choose_sizes`), and the resizes done
(`settle.settle`). Begin with `question`, then `live.sizes_of`.
"""
