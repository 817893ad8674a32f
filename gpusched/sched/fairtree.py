"""Fair share over a tree of groups: the order of users by shares and recent usage.

Fair Tree (Cox and Morrison, Brigham Young University; in Slurm since 14.11, https://slurm.schedmd.com/fair_tree.html):
among siblings the one with the larger level fairshare S / U goes first, with all that is below it; S is its part of its
siblings' shares, U of their use. So no user of a group that has used more than its part goes before one of a group that
has used less. Where siblings are equal, what is below them is compared as if it were below one. Here it is the other
way up, U / S, smallest first, so that without groups it is use itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.model.limits import Groups
from gpusched.sched.sorting import stable_order
from gpusched.sched.state import Floats, Ints, Records

# used: GPU seconds, decayed, at ``since``. held: GPUs since then. place: as of `rank_users`.
USER = np.dtype([("used", np.float64), ("since", np.float64), ("held", np.int64), ("place", np.int64)])


class FairShareTree(NamedTuple):
    """The leaves (users, each in one group) and the nodes above them.

    Attributes:
        path: ``int64[leaves, levels]``: the nodes from the top down to the leaf itself; then -1.
        parent: ``int64[nodes]``, -1: at the top. share: ``float64[nodes]``. siblings: ``float64[nodes]``: the shares of
            all siblings of the node, its own included.
    """

    path: Ints
    parent: Ints
    share: Floats
    siblings: Floats


def tree_of(groups: Groups, leaves: Sequence[tuple[str, str]]) -> FairShareTree:
    """Build the tree of these (user, group); users without a group are at the top with one share each."""
    names = {group.name: i for i, group in enumerate(groups.groups)}
    parent = [names.get(group.parent, -1) for group in groups.groups]
    share = [float(group.shares) for group in groups.groups]
    below = [float(sum(group.members.values())) for group in groups.groups]  # members that are no leaf count, too
    top = 0.0
    for group in groups.groups:
        if group.parent:
            below[names[group.parent]] += group.shares
        else:
            top += group.shares
    paths = []
    for user, name in leaves:
        found = groups.get(name)
        own = found.members.get(user) if found is not None else None
        if found is None:
            top += 1.0
        elif own is None:
            below[names[name]] += 1.0
        paths.append([*(names[above] for above in reversed(groups.above(name))), len(parent)])
        parent.append(names.get(name, -1))
        share.append(float(own if own is not None else 1))
    levels = max((len(path) for path in paths), default=1)
    siblings = [top if at < 0 else below[at] for at in parent]
    filled = [path + [-1] * (levels - len(path)) for path in paths]
    return FairShareTree(
        np.array(filled, np.int64).reshape(len(paths), levels), np.array(parent, np.int64), np.array(share),
        np.array(siblings),
    )  # fmt: skip


@jit
def used_now(used: float, held: int, seconds: float, half_life: float) -> float:
    """Return GPU seconds after so many more seconds: usage halves every half-life, decaying continuously."""
    rate = math.log(2.0) / half_life
    kept = math.exp(-rate * seconds)
    return float(used * kept + held * (1.0 - kept) / rate)


@jit
def account(users: Records, user: int, now: float, half_life: float) -> None:
    """Bring a user's usage up to now: ``used`` (GPU seconds, decayed), at ``since``, with ``held`` GPUs since then."""
    of = users[user]
    if now != of["since"] and (of["held"] > 0 or of["used"] > 0):
        of["used"] = used_now(of["used"], of["held"], now - of["since"], half_life)
    of["since"] = now


@jit
def places(tree: FairShareTree, usage: Floats) -> Ints:
    """Rank leaves by ``usage: float64[leaves]``: 0 goes first, ties share a rank; ``int64[leaves]``."""
    path, parent = tree.path, tree.parent
    leaves, levels = path.shape
    used = np.zeros(parent.size)
    for leaf in range(leaves):
        for level in range(levels):
            if path[leaf, level] >= 0:
                used[path[leaf, level]] += usage[leaf]
    whole = 0.0
    for node in range(parent.size):
        whole += used[node] if parent[node] < 0 else 0.0
    key = np.zeros(parent.size)
    for node in range(parent.size):
        of_all = used[parent[node]] if parent[node] >= 0 else whole
        if of_all > 0:  # a part of at most 1, however little all have used: else quotients overflow
            key[node] = used[node] / of_all * (tree.siblings[node] / tree.share[node])
        key[node] = np.float64(np.float32(key[node]))  # ties stay ties, however quotients round
    order = np.arange(leaves)
    keys = np.zeros(leaves)
    for back in range(levels):
        level = levels - 1 - back
        for i in range(leaves):
            node = path[order[i], level]
            keys[i] = key[node] if node >= 0 else -1.0
        order = order[stable_order(keys)]
    found = np.zeros(leaves, np.int64)
    place = 0
    for i in range(leaves):
        if i > 0:
            for level in range(levels):
                node_key, other = path[order[i - 1], level], path[order[i], level]
                if (key[node_key] if node_key >= 0 else -1.0) != (key[other] if other >= 0 else -1.0):
                    place += 1
                    break
        found[order[i]] = place
    return found


@jit
def rank_users(tree: FairShareTree, users: Records, now: float, half_life: float) -> None:
    """Set the places of users, ``USER[leaves]``, by their current usage: GPU hours, and GPUs held."""
    usage = np.empty(users.size)
    for user in range(users.size):
        account(users, user, now, half_life)
        usage[user] = users[user]["used"] / 3600.0 + users[user]["held"]
    users["place"][:] = places(tree, usage)
