"""Predicted start times: the queue simulated forward.

In: a snapshot of the queue, jobs that have ended. Out: ranges of start times. May import: sim's engine, traces, sched,
estimation, model. Begin with `start_times`, then `run_times` (draws), `queue`, `run`.
"""
