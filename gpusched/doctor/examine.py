"""The whole examination: files, state folder, and all nodes at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gpusched.config.paths import state_folder
from gpusched.doctor.files import examine_inventory, examine_policies
from gpusched.doctor.findings import Finding
from gpusched.doctor.nodes import examine_node
from gpusched.doctor.state import examine_state, known_nodes
from gpusched.doctor.topology import judge_topology
from gpusched.errors import UsageError
from gpusched.model.resources import Inventory, Node
from gpusched.promotion.live import mode_of

_THREADS = 32


def examine(
    inventory_path: Path | str | None = None,
    state: Path | None = None,
    *,
    nodes: Collection[str] = (),
    on_findings: Callable[[list[Finding]], None] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.time,
) -> list[Finding]:
    """Examine the cluster end to end. Changes nothing here; on the nodes it leaves the cached probe.

    Where a GPU is free a container with it is started, and removed; nothing is pulled for that. Inventory and state
    folder are the ones in force where none is given; of the nodes only those named are examined, all where none is.
    ``on_findings`` is given each subject's findings as they come, the nodes' in the order in which they answer, and
    ``on_progress`` how many nodes of how many have answered.

    Returns:
        The findings: inventory, policies, state, Slurm where it is the engine, the nodes in the inventory's order, then
        the topology.

    Raises:
        UsageError: ``nodes`` names one that the inventory does not have.
    """
    report = on_findings or (lambda findings: None)
    state = state_folder() if state is None else state
    found, inventory = examine_inventory(inventory_path)
    if inventory is not None:
        found += examine_policies(inventory, state)
    report(found)
    chosen = _chosen(inventory, nodes)
    known = known_nodes(state)
    here = examine_state(state, inventory.settings.tick_s if inventory is not None else 5.0, clock())
    slurm = None
    if inventory is not None and inventory.engine == "slurm":
        from gpusched.doctor.slurm import examine_slurm, judge_positions

        modes = {p.name: mode_of(p, known.changes.get(p.name)) for p in inventory.partitions}
        slurm_findings, slurm = examine_slurm(inventory, state, modes, known.trouble, clock())
        here += slurm_findings
        chosen = [node for node in chosen if node.transport != "none"]
    report(here)
    if inventory is None or not chosen:
        return found + here
    images = {p.name: p.default_image for p in inventory.partitions}
    starts = inventory.engine == "ssh"
    by_node: dict[str, list[Finding]] = {}
    wirings = dict(known.wirings)
    with ThreadPoolExecutor(max_workers=min(_THREADS, len(chosen))) as pool:
        asked = {
            pool.submit(
                examine_node, n, inventory.settings, known, clock, images.get(n.partition), starts_jobs=starts
            ): n.name
            for n in chosen
        }
        for future in as_completed(asked):
            by_node[asked[future]], wiring = future.result()
            if wiring is not None:
                wirings[asked[future]] = wiring
            report(by_node[asked[future]])
            on_progress(len(by_node), len(chosen))
    wired = judge_topology(inventory, wirings)
    if slurm is not None:
        wired += judge_positions(inventory, slurm, wirings)
    report(wired)
    return found + here + [f for n in chosen for f in by_node[n.name]] + wired


def _chosen(inventory: Inventory | None, names: Collection[str]) -> list[Node]:
    if inventory is None:
        return []
    unknown = [n for n in names if inventory.node(n) is None]
    if unknown:
        declared = f"{os.fspath(inventory.path)} has {_node_list(inventory.nodes)}"
        raise UsageError(f"no node named {unknown[0]}", declared)
    return [n for n in inventory.nodes if not names or n.name in names]


def _node_list(nodes: Iterable[Node]) -> str:
    names = [n.name for n in nodes]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
