"""The base class of faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tests.campaign.site import Site
    from tests.testbed import TestNode

NODES = ("dgx001", "dgx002", "dgx003", "dgx004")
PODMAN = ("dgx001", "dgx003")


class Fault:
    """A fault that a schedule asks for; its docstring says what happens.

    Attributes:
        lasts: It is healed later; else it is over when `inject` returns.
        nodes: Those that it can hit, one at a time; empty: it hits none.
        ends_attempts: It may end attempts on its node, or keep them from starting there.
        costs_exit_codes: It may cost the exit codes of attempts on its node.
    """

    lasts: ClassVar[bool] = True
    nodes: ClassVar[Sequence[str]] = ()
    ends_attempts: ClassVar[bool] = False
    costs_exit_codes: ClassVar[bool] = False
    had_effect = True
    """False where it found nothing to hit, or its disk operation did not come."""

    def __init__(self, site: Site, node: str, amount: float) -> None:
        self.site, self.amount = site, amount
        self.node_name = node

    @classmethod
    def name(cls) -> str:
        """``family.kind``."""
        kind = "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("_")
        return f"{cls.__module__.rpartition('.')[2]}.{kind}"

    @property
    def node(self) -> TestNode:
        """The node that it hits."""
        return self.site.node(self.node_name)

    def pick(self, most: int) -> int:
        """A whole number from 0 to below ``most``, by the amount that was drawn."""
        return min(int(self.amount * most), most - 1)

    def may_heal(self, after_s: float) -> bool:
        """Whether it has lasted long enough, ``after_s`` seconds after it was injected."""
        return True

    def inject(self) -> None:
        """Let it happen."""
        raise NotImplementedError

    def heal(self) -> None:
        """Put right what `inject` did; called once, where it lasts."""


def environment(pid: int) -> dict[bytes, bytes]:
    """The variables with which a process was started; empty when it is gone."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (word.partition(b"=") for word in words)}
