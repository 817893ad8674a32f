"""A site whose policies have agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.controller.cycle import Cycle
from gpusched.model import ids
from gpusched.model.commands import Promote, Submit
from gpusched.model.policy import PolicySpec
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.builders import spec
from tests.controller.imagined import Host, ImaginedCluster, World, inventory
from tests.controller.site import Turns
from tests.promotion import weights

EASY = load_policy(BUILT_IN / "easy.yaml")


class Place(Turns):
    """A controller over three imagined nodes of four GPUs, and a folder of policies with a trained agent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.policy = folder / "policies/gist.yaml"
        self.file = weights.write(folder / "policies/gist/p.safetensors")
        self.policy.write_text(weights.YAML)
        self.inventory = msgspec.structs.replace(inventory(), path=str(folder / "inventory.yaml"))
        self.inbox = Inbox(self.state)
        self.inbox.create()
        self.world = World(hosts={n.name: Host(n.name) for n in self.inventory.nodes})
        self.store = Store.create_or_open(self.state)
        self.cluster = ImaginedCluster(self.world)
        self.open()

    def open(self, live: PolicySpec | None = None) -> None:
        """A controller that has just started."""
        policies = {"p": live or load_policy(self.policy)}
        self.cycle = Cycle(
            self.store, self.state, self.inventory, policies, self.cluster, lambda: self.world.now
        )  # fmt: skip

    def submit(self, **changes: Any) -> str:
        self.world.now += 0.01
        command = Submit(time=self.world.now, id=ids.mint(self.world.now), spec=spec(**changes))
        self.inbox.deliver(command)
        return command.id

    def decided_by(self) -> str | None:
        """Submit a job, and who starts it in the very next cycle."""
        job = self.submit()
        self.turn()
        return self.job(job).policy

    def kinds(self, *kinds: str) -> list[str]:
        return [e.kind for e in self.store.events(limit=10_000) if e.kind in kinds]

    def say(self, command: Any) -> list[str]:
        """Deliver a command and run a cycle; returns the refusals."""
        before = len(self.kinds("refused_command"))
        self.inbox.deliver(command)
        self.turn()
        return [str(e.data["why"]) for e in self.store.events(limit=10_000) if e.kind == "refused_command"][before:]

    def promote(self) -> list[str]:
        version = load_policy(self.policy).version
        command = Promote(
            time=0.0, partition="p", path=str(self.policy), version=version, reason="try", forced=True
        )  # fmt: skip
        return self.say(command)
