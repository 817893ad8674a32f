"""Two jobs on the same GPUs: who may, and who is put beside whom once the policies have decided.

In: a snapshot, its plan, and what is believed of kinds of jobs. Out: the plan with more starts. Pure. Begin with
`pairs`; `rules` is what may be at all, by which `check` goes, too.
"""
