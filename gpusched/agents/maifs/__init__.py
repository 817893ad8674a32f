"""MAIFS (Li et al., IEEE TPDS 2025): the nodes of a job and its GPUs, cores and GB, decided in one joint step.

Only the paper's abstract is public: the setting and all parameters are our choice, listed in docs/concepts/maifs.md.
In: measured sensitivities and arrivals. Out: mean JCT and makespan of a policy. Begin with `world` (the setting), then
`engine` (a run), `joint` (the joint step), `rules`, and the agent's parts: `beliefs` (speeds learned from running jobs)
and `network`. `reproduce` makes the table. May import: sim, traces.
"""
