"""GPU sharing by two jobs: which jobs may share, and which are paired after the policies have decided.

In: a snapshot with beliefs on kinds of jobs, and the jobs that the policies left pending. Out: more starts, or why not.
Pure. Begin with `pairs`, which fills the arrays of `kernel.beside`; `rules` is what may be at all, as `check` has it.
"""
