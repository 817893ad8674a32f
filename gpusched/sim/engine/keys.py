"""Orders whose keys change while jobs wait, and users' usage, on which they depend."""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.fairtree import account
from gpusched.sched.state import Floats, Ints, Records
from gpusched.sim.engine.state import Sim

PLAIN, FAIRSHARE, WFP3, UNICEF, MULTIFACTOR, SHORTEST, LONGEST = range(7)
ORDER_CODES = {
    "fairshare": FAIRSHARE,
    "wfp3": WFP3,
    "unicef": UNICEF,
    "multifactor": MULTIFACTOR,
    "sjf-estimate": SHORTEST,
    "lpt-estimate": LONGEST,
}

_MAX_AGE_S = 7 * 86400.0

# used: decayed GPU seconds at ``since``. held: GPUs held now. Both by `SHAPE.weight`.
USER = np.dtype([("used", np.float64), ("since", np.float64), ("held", np.int64)])


@jit
def count_held_gpus(sim: Sim, users: Records, job: int, sign: int) -> None:
    """Add (sign 1) or subtract (-1) a job's GPUs from those that its user holds."""
    user = sim.jobs[job]["user"]
    account(users, user, sim.clock[0], sim.clock[2])
    shape = sim.shapes[sim.jobs[job]["shape"]]
    users[user]["held"] += sign * shape["parts"] * shape["gpus"] * shape["weight"]


@jit
def order_keys(sim: Sim, users: Records, jobs: Ints, order: int) -> Floats:
    """Return each job's current key, ``float64[jobs]``, smallest first; see `_key`."""
    used = 0.0
    active = 0
    for user in range(users.size):
        account(users, user, sim.clock[0], sim.clock[2])
        used += users[user]["used"]
        active += users[user]["used"] > 0 or users[user]["held"] > 0
    gpus = 0
    for node in range(sim.node.size):
        gpus += sim.node[node]["total"]
    keys = np.empty(jobs.size)
    for i in range(jobs.size):
        keys[i] = _key(sim, users, jobs[i], order, used, max(active, 1), max(gpus, 1))
    return keys


@jit
def _key(sim: Sim, users: Records, job: int, order: int, used: float, active: int, gpus: int) -> float:
    """Return one job's key.

    fairshare: the user's decayed GPU hours and one for each GPU held, as the live policy. WFP3: -(w / r)^3 n. UNICEF:
    -w / (log2(n) r), log2(1) taken as 1e-15 as in RLScheduler (Zhang et al., SC 2020), so that one-GPU jobs go first.
    multifactor: -(age + fair share + size) with equal weights, Slurm's factors in 0..1: age w / 7 days at most 1; fair
    share 2^(-usage's share / one share of the active users); size n / all.
    """
    of = sim.jobs[job]
    shape = sim.shapes[of["shape"]]
    n, r, w = float(shape["parts"] * shape["gpus"]), of["expected"], sim.clock[0] - of["submit"]
    user = users[of["user"]]
    if order == FAIRSHARE:
        return float(user["used"] / 3600.0 + user["held"])
    if order == WFP3:
        return float(-((w / r) ** 3) * n)
    if order == UNICEF:
        return float(-w / (max(np.log2(max(n, 1.0)), 1e-15) * r))
    if order == MULTIFACTOR:
        share = user["used"] / used if used > 0 else 0.0
        return float(-(min(w / _MAX_AGE_S, 1.0) + 2.0 ** (-share * active) + n / gpus))
    return float(-r if order == LONGEST else r)
