"""When a job will start and how long it will run: live and in replays.

In: a snapshot of the queue, users' past jobs, a trained predictor. Out: ranges of start times, quantiles of run
times. May import: sim's engine, sched, traces, config, model. Begin with `start_times`, then `queue` (the queue run
forward), `predictor`.
"""
