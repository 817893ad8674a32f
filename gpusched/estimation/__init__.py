"""How long jobs run, estimated from those that have ended: one store by key, one way to ask, live and in replays.

In: a trace, or past jobs. Out: estimates and their quantiles; the same as arrays for compiled passes. Pure, but for the
predictor's file. May import: config, model. Begin with `predictor.Estimator`, then `features` (what is
known, compiled), `odds` (ends by level of run time), `limit_use` (draws for forecasts).
"""

REMEMBERED = 2000  # ended jobs that the live cluster, and a sequence that an agent learns from, go by; the last ones
