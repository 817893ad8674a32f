"""Predicted start times: the queue simulated forward.

In: a snapshot of the queue, draws of run times. Out: ranges of start times. May import: sim's engine, sched,
estimation, model. Begin with `start_times`, then `queue`, `run`.
"""
