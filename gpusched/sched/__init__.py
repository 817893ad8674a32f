"""Scheduling decisions: pure passes from a snapshot to a plan, compiled where they are hot.

In: `model.snapshot.Snapshot`. Out: `model.plan.Plan`. May import: model, and types of config; no clock, I/O or
randomness. Begin with `decide.decide`, then `stages` and `kernel` (the walk), `place`, `backfill`,
`check.check`; `explain.explain` answers "why is it waiting" by asking them. Import the module you need: nothing is
imported here, so that the CLI stays quick.
"""
