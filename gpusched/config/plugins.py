"""Components by entry point: this package's and others' are in the same groups of their pyproject.toml.

A component is one object under one name: below ``[project.entry-points."gpusched.traces"]`` a line such as
``mylog = "acme.mylog:read"``. Listing imports nothing of it; a component that is broken is one line, and takes nothing
else with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from traceback import extract_tb
from typing import Any

from gpusched.errors import GpuschedError, Warnings
from gpusched.model.resources import RuntimeName

OURS = "gpusched-cluster"
"""The distribution of this package."""
GROUPS = {
    "traces": "trace format", "notifiers": "notifier", "runtimes": "runtime", "orders": "order",
    "placements": "placement", "sizings": "sizing rule", "agents": "agent",
}  # fmt: skip
"""Group -> what one of its components is called; entry points stand in the group ``gpusched.traces`` and so on."""


POLICY_GROUPS = ("orders", "placements", "sizings", "agents")
"""The groups that policies' files name components of."""


class ComponentError(GpuschedError):
    """A component of another distribution that cannot be loaded, or does not fit its group."""


@dataclass(frozen=True)
class Component:
    """An installed component.

    Attributes:
        group: One of `GROUPS`. name: What users call it by.
        value: Where it is, ``package.module:object``.
        distribution: What it came with. version: Of that.
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """Return its origin as shown to users: ``gpusched``, or ``acme-gpusched 1.2``."""
        return "gpusched" if self.distribution == OURS else f"{self.distribution} {self.version}"

    def load(self) -> Any:
        """Import the component.

        Raises:
            ComponentError: It cannot be imported, whatever the reason.
        """
        module, _, name = self.value.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split(".") if name else ():
                found = getattr(found, part)
        except Exception as error:  # third-party code may raise anything
            raise self.failed(error) from error
        return found

    def failed(self, error: Exception) -> ComponentError:
        """Return the error to raise for what the component raised."""
        return self.error(self.reason(error))

    def reason(self, error: Exception) -> str:
        """Return what it raised, and from which line of its package."""
        package = self.value.partition(":")[0].partition(".")[0]
        frames = [(f.filename.rpartition(f"/{package}/"), f.lineno) for f in extract_tb(error.__traceback__)]
        at = next((f" ({package}/{file}:{line})" for (_, found, file), line in reversed(frames) if found), "")
        return f"{type(error).__name__}: {error}{at}"

    def error(self, why: str) -> ComponentError:
        """Return the error to raise where the component does not work."""
        text = " ".join(f"{GROUPS[self.group]} '{self.name}' of {self.origin} does not work: {why}".split())
        return ComponentError(text[:500], f"upgrade or remove {self.distribution}")


@cache
def components(group: str) -> Mapping[str, Component]:
    """Return the installed components of a group by name, this package's first, without importing them.

    A name that this package or a distribution earlier in the alphabet has already is ignored with a warning, so that
    installing something cannot change what a name meant before.

    Raises:
        GpuschedError: This package's own are missing: its installation is of another version.
    """
    from importlib.metadata import entry_points

    found = [
        Component(group, point.name, point.value, point.dist.name, point.dist.version)
        for point in entry_points(group=f"gpusched.{group}")
        if point.dist is not None
    ]
    if all(one.distribution != OURS for one in found):
        raise GpuschedError(
            f"this installation of gpusched lists no {GROUPS[group]}", f"install it again: pip install {OURS}"
        )
    taken: dict[str, Component] = {}
    for one in sorted(found, key=lambda c: (c.distribution != OURS, c.distribution)):
        other = taken.setdefault(one.name, one)
        if other.distribution != one.distribution:
            Warnings.give(
                f"{GROUPS[group]} '{one.name}' of {one.origin} is ignored: {other.origin} has one of that name"
            )
    return taken


def installed(group: str, name: str) -> Component:
    """Return a component by its name.

    Raises:
        ComponentError: It is not installed here: a package that had it may have been removed.
    """
    found = components(group).get(name)
    if found is None:
        raise ComponentError(f"no {GROUPS[group]} '{name}' is installed here", "install the package that it came with")
    return found


def origin_of(named: Iterable[tuple[str, str]]) -> str:
    """Return where these components (group and name) come from; none: from this package."""
    found = [one.origin if (one := components(group).get(name)) else "not installed" for group, name in named]
    return ", ".join(dict.fromkeys(found)) or "gpusched"


def has_containers(runtime: str) -> bool:
    """Return whether jobs of a node with this runtime run in containers: they have an image, and folders are mounted.

    Raises:
        ComponentError: It is another package's, and does not work.
    """
    if runtime in tuple(RuntimeName):
        return runtime != RuntimeName.PROCESS
    component = components("runtimes").get(runtime)
    return component is not None and bool(getattr(component.load(), "containers", False))


def all_bare(runtimes: Collection[str]) -> bool:
    """Return whether there are nodes with these runtimes, and all of them run jobs without containers."""
    return bool(runtimes) and not any(map(has_containers, runtimes))
