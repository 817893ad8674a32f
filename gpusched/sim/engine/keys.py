"""Orders whose keys change while jobs wait, and users' usage, on which they depend."""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.model.limits import Groups
from gpusched.sched.fairtree import FairShareTree, account, rank_users
from gpusched.sched.state import Floats, Ints, Records, ints
from gpusched.sim.engine.state import Sim
from gpusched.traces.trace import Trace

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


def usage_leaves(trace: Trace, groups: Groups) -> tuple[list[tuple[str, str]], Ints]:
    """Return the (user, group) for whom usage counts, and for which of them each job's does, ``int64[jobs]``.

    As live: a job counts for the group that it names, else for its user's first one. Without groups, for its user.
    """
    if not groups:
        users = int(trace.user.max(initial=-1)) + 1
        return [(f"{user:09}", "") for user in range(users + 1)], trace.user % (users + 1)
    account = np.full(len(trace), -1) if trace.account is None else trace.account
    kinds, of = np.unique(np.column_stack((trace.user, account)), axis=0, return_inverse=True)
    leaves: dict[tuple[str, str], int] = {}
    found = []
    for user, group in kinds.tolist():
        name = "" if user < 0 else trace.users[user] if user < len(trace.users) else str(user)
        leaf = name, groups.for_job(name, trace.accounts[group] if group >= 0 else "")
        found.append(leaves.setdefault(leaf, len(leaves)))
    return list(leaves), ints(found)[of.reshape(-1)]


@jit
def count_held_gpus(sim: Sim, users: Records, user: int, job: int, sign: int) -> None:
    """Add (sign 1) or subtract (-1) a job's GPUs, by `SHAPE.weight`, from those that its user holds."""
    account(users, user, sim.clock[0], sim.clock[2])
    shape = sim.shapes[sim.jobs[job]["shape"]]
    users[user]["held"] += sign * shape["parts"] * shape["gpus"] * shape["weight"]


@jit
def order_keys(sim: Sim, users: Records, leaf: Ints, tree: FairShareTree, jobs: Ints, order: int) -> Floats:
    """Return each job's current key, ``float64[jobs]``, smallest first; see `_key`. For the rest see `SimQueue`."""
    ranked = order == FAIRSHARE and tree.parent.size > 0
    if ranked:
        rank_users(tree, users, sim.clock[0], sim.clock[2])
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
        user = users[leaf[jobs[i]]]
        if ranked:
            keys[i] = user["place"]
        else:
            keys[i] = _key(sim, user["used"], user["held"], jobs[i], order, used, max(active, 1), max(gpus, 1))
    return keys


@jit
def _key(
    sim: Sim, own: float, held: int, job: int, order: int, used: float, active: int, gpus: int
) -> float:  # fmt: skip
    """Return one job's key; ``own``, ``held``: its user's usage (GPU seconds) and GPUs.

    fairshare: the user's decayed GPU hours and one for each GPU held, as live without groups. WFP3: -(w / r)^3 n.
    UNICEF: -w / (log2(n) r), log2(1) taken as 1e-15 as in RLScheduler (Zhang et al., SC 2020), so that one-GPU jobs go
    first. multifactor: -(age + fair share + size) with equal weights, Slurm's factors in 0..1: age w / 7 days at most
    1; fair share 2^(-usage's share / one share of the active users); size n / all.
    """
    of = sim.jobs[job]
    shape = sim.shapes[of["shape"]]
    n, r, w = float(shape["parts"] * shape["gpus"]), of["expected"], sim.clock[0] - of["submit"]
    if order == FAIRSHARE:
        return float(own / 3600.0 + held)
    if order == WFP3:
        return float(-((w / r) ** 3) * n)
    if order == UNICEF:
        return float(-w / (max(np.log2(max(n, 1.0)), 1e-15) * r))
    if order == MULTIFACTOR:
        share = own / used if used > 0 else 0.0
        return float(-(min(w / _MAX_AGE_S, 1.0) + 2.0 ** (-share * active) + n / gpus))
    return float(-r if order == LONGEST else r)
