"""RLTune (Dongare et al., SoCC 2025): the order of a queue, learned; nodes by best fit or by mapping; preemption.

In: a window of waiting jobs and the history of ended ones. Out: the order, jobs to start, jobs to preempt. Begin with
`decide` (the passes), `history` (its memory), `live` and `replay` (their callers), `train`.
"""
