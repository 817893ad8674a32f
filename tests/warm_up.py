"""Compile what most tests use before the test processes start: each would compile the same at the same time."""

import os

from gpusched.model.policy import PolicySpec
from gpusched.sched.warming import warm_up
from gpusched.sim.pool import Pool
from gpusched.sim.replay import one_job, replay

if __name__ == "__main__":
    os.environ.setdefault("GPUSCHED_COMPILED", "always")
    for policy in ("fifo", "fifo+easy"):
        replay(one_job(), Pool.uniform(1, 1), policy)
    warm_up([PolicySpec(name="by cost", place="contention")])
