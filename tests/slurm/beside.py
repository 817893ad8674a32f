"""Cycles beside real Slurm in this process: each one when it is asked for, at the time that is asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from gpusched.cluster.base import ClusterBackend
from gpusched.config.inventory import load_inventory
from gpusched.config.policies import BUILT_IN, load_policies, load_policy
from gpusched.controller.slurm.applying import LeaseApplier
from gpusched.controller.slurm.cycle import SlurmCycle, SlurmDecision
from gpusched.controller.slurm.reading import SlurmReading
from gpusched.model.commands import Promote, Rollback
from gpusched.model.plan import Action, Plan
from gpusched.model.slurm import SlurmMode
from gpusched.queue.store import Store
from gpusched.slurm.commands import Slurm
from tests.slurm.conftest import SlurmCluster


class Counting(Slurm):
    """Slurm, with what was asked of it in each cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def update(self, lines: Sequence[str]) -> dict[int, str]:
        self.asked += lines
        return super().update(lines)


class Wanting(LeaseApplier):
    """The applier, which can be given a plan of the test's in place of the policy's."""

    plan: tuple[Action, ...] | None = None

    def apply(self, inventory: Any, modes: Any, seen: SlurmReading, decided: SlurmDecision | None, now: float) -> None:
        if self.plan is not None and decided is not None:
            decided = decided._replace(plan=Plan(actions=self.plan, reasons=decided.plan.reasons))
        super().apply(inventory, modes, seen, decided, now)


class NoNodes:
    """A port to nodes of which none answers yet."""

    def observe(self, *_: object) -> dict[str, object]:
        return {}


class Beside:
    """A controller of a `SlurmCluster` whose nodes are not asked.

    Attributes:
        later: Seconds that its clock is ahead. at: When it stands still; None: it does not.
    """

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster, self.site, self.later = cluster, cluster.site, 0.0
        self.at: float | None = None
        cluster.write_inventory(nodes={n.name: {"transport": "none"} for n in cluster.testbed.nodes})
        self.begin()

    def begin(self) -> None:
        """A new process, as far as memory goes."""
        inventory = load_inventory(self.cluster.inventory)
        self.store = Store.create_or_open(self.cluster.state)
        self.slurm = Counting()
        self.applier = Wanting(self.store, self.slurm)
        self.cycle = SlurmCycle(
            self.store, self.cluster.state, inventory, load_policies(inventory), cast(ClusterBackend, NoNodes()),
            lambda: (time.time() if self.at is None else self.at) + self.later, self.slurm, self.applier,
        )  # fmt: skip
        self.cycle.inbox.create()

    def run(self, *plan: Action, later: float = 0.0) -> list[str]:
        """One cycle; what it asked of Slurm but for the lease. ``plan``: in place of the policy's."""
        self.later += later
        self.slurm.asked.clear()
        self.applier.plan = plan or None
        self.cycle._reader._rest_s = 0.0  # Slurm need not be spared here
        self.cycle.run(3.0)
        return [line for line in self.slurm.asked if "JobId=" in line or line.startswith("requeue")]

    def promote(self, mode: str, policy: str = "easy", partition: str = "A100") -> None:
        """Ask for it, without proof."""
        path = BUILT_IN / f"{policy}.yaml"
        command = Promote(
            time=time.time(), partition=partition, path=str(path), version=load_policy(path).version, reason="a test",
            forced=True, mode=SlurmMode(mode),
        )  # fmt: skip
        self.cycle.inbox.deliver(command)

    def rollback(self, partition: str = "A100") -> None:
        """Take the last promotion back."""
        self.cycle.inbox.deliver(Rollback(time=time.time(), partition=partition, reason="a test"))
