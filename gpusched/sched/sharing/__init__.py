"""GPU sharing by two jobs: which jobs may share, and which are paired after the policies have decided.

In: a snapshot with what is believed of kinds of jobs, and whom the policies left waiting. Out: more starts, or why not.
Pure. Begin with `pairs`, which fills the arrays of `kernel.beside`; `rules` is what may be at all, as `check` has it.
"""
