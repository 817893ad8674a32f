"""Learned systems, one folder each; their passes decide alike live, in replays and in training.

In: snapshots and replays' worlds (through `sched.agent` and `sim.replay`), traces to learn from. Out: decisions,
weights, cards. `base` defines an agent's parts and the registry. torch is imported by training modules only. May
import: study, sim, traces, sched. Begin with `base`, then a folder's ``decide``.
"""
