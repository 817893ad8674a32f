"""RLTune (Dongare et al., SoCC 2025): the order of a queue, learned; nodes by best fit or by mapping; preemption.

In: a window of waiting jobs and what is remembered of ended ones. Out: the order, who starts, who stops. Begin with
`decide` (the passes), `history` (what it remembers), `live` and `replay` (who call them), `train`.
"""
