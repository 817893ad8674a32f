"""MAIFS (Li et al., IEEE TPDS 2025): where a job runs and how many GPUs, cores and GB it gets, decided in one step.

Of the paper only the abstract is public: the setting and every parameter are ours, docs/concepts/maifs.md says which.
In: measured sensitivities and arrivals. Out: mean JCT and makespan of a policy. Begin with `world` (the setting), then
`engine` (a run), `joint` (the one step), `rules`, and what the agent adds: `beliefs` (speeds learned by watching) and
`network`. `reproduce` makes the table. May import: sim, traces.
"""
