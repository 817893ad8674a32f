"""Run times of jobs, from those that have ended, live and in replays; and job speeds, from their own reports.

In: a trace, past jobs, or speeds. Out: estimates and their quantiles; the same as arrays for compiled passes. Pure. May
import: config, model. Begin with `estimators.HistoryEstimator`, then `groups` (which jobs are alike), `quantiles` (what
is known, compiled), `draws` (for forecasts), `odds` (ends by level of run time); of speeds with `speeds`.
"""

REMEMBERED = 2000  # ended jobs that the live cluster, and an agent's training sequence, remember; the last ones
