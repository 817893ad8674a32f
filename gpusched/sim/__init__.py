"""Replays: a trace on a pool of nodes under a policy, on a virtual clock; the passes that decide are sched's own.

Or indexes that decide the same, start by start (`engine.static`, `engine.placing_index`). In: `Trace`, `pool.Pool`, a
policy by name. Out: a `result.Result`: every job's start, end and nodes, the events in order. May import: traces,
estimation, sched, config, model. Begin with `replay.replay`, then `engine`; `rounds` runs settings of papers on it.
"""
