"""The GIST paper's episodes on real nodes: hours as seconds, in the two partitions at once; and the same simulated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.gist.setting import HOUR_S, EpisodeSetting, paper, tables_of
from gpusched.config.weights import Arrays, TrainedModel, save_model
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.replay import replay
from tests.e2e.conftest import Cluster

PARTITIONS = ("A100", "V100")
FILES = {
    "naive": "order: fifo\nplace: naive\nbackfill: skip\n",
    "first-fit": "order: fifo\nplace: first-fit\nbackfill: skip\n",
    "agent": "agent: gist\nfallback: easy\nbudget: 60s\n",
}
"""The policies that are compared, by name."""


def on_nodes(partition: str) -> EpisodeSetting:
    """The paper's setting with the cores and the memory of the testbed's nodes, shared alike."""
    setting = paper(partition)
    servers = tuple(server._replace(cores=8, memory_mib=4096) for server in setting.servers)
    kinds = tuple(kind._replace(cores=kind.gpus, memory_mib=512 * kind.gpus) for kind in setting.kinds)
    return replace(setting, servers=servers, kinds=kinds)


def write_site(cluster: Cluster, policy: str, arrays: Arrays) -> None:
    """Write inventory.yaml with flavors of the setting, the policies, and the agent's weights for both partitions."""
    folder = cluster.folder / "policies"
    (folder / "agent").mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(text)
    cluster.write_inventory(policies=dict.fromkeys(PARTITIONS, policy))
    text = json.loads(cluster.inventory.read_text())
    for name in PARTITIONS:
        model = model_of(on_nodes(name), arrays)
        save_model(folder / "agent" / f"{name}.safetensors", "gist", model.arrays, model.about)
        flavors = {
            k.name: {"gpus": k.gpus, "cores": k.cores, "memory": f"{k.memory_mib}M", "time": "1h"}
            for k in on_nodes(name).kinds
        }
        flavors[f"f-{name}"] = {"gpus": 16, "cores": 16, "memory": "8G", "time": "1h"}
        text["partitions"][name]["flavors"] = flavors
    cluster.inventory.write_text(json.dumps(text))


def model_of(setting: EpisodeSetting, arrays: Arrays) -> TrainedModel:
    """The network as weights for a setting."""
    about = {"variant": "masked", "knows": "limit", "patience_s": str(90 * 86400)}
    return TrainedModel("gist", {**arrays, **tables_of(setting)}, about, "", f"{setting.name} {id(arrays)}")


class Episode(NamedTuple):
    """An episode: its U and its hours until f starts.

    Attributes:
        starts, held: Of each of the first jobs in order, hours: from the first start to its own; that it had its GPUs.
        servers: Index of its server.
    """

    utilization: float
    hours: float
    starts: tuple[float, ...]
    held: tuple[float, ...]
    servers: tuple[int, ...]


def submit(cluster: Cluster, partition: str, sequence: Sequence[int], hour_s: float) -> list[str]:
    """Queue an episode, its jobs all eligible at the same moment; return their ids, f's last."""
    kinds, ids = paper(partition).kinds, []
    for kind in sequence:
        seconds = kinds[kind].run_s / HOUR_S * hour_s
        ids.append(cluster.sh(f"exec sleep {seconds:g}", "-F", kinds[kind].name, "--hold"))
    f = cluster.submit("-F", f"f-{partition}", "--dependency", f"afterany:{':'.join(ids)}")
    cluster.cli("release", *ids)
    return [*ids, f]


def lived(cluster: Cluster, ids: Sequence[str], partition: str, hour_s: float, decisions: np.ndarray) -> Episode:
    """An episode as it went, once f has ended.

    A job has its GPUs until the decision after its end, however late that comes; ``decisions``: when there were any.
    """
    names = [node.name for node in cluster.testbed.nodes][PARTITIONS.index(partition) :: 2]
    begin, end, servers = [], [], []
    for job in ids:
        times = {event.kind: event for event in cluster.events(job)}
        begin.append(times["starting"].time / hour_s)
        end.append(decisions[np.searchsorted(decisions, times["ended"].time)] / hour_s if job != ids[-1] else 0.0)
        servers.append(names.index(next(iter(times["starting"].data["nodes"]))))
    gpus = [_gpus(cluster, job) / 16 for job in ids[:-1]]
    first, held = min(begin), [e - b for b, e in zip(begin[:-1], end[:-1], strict=True)]
    hours = begin[-1] - first
    work = sum(share * ran for share, ran in zip(gpus, held, strict=True))
    return Episode(work / hours, hours, tuple(b - first for b in begin[:-1]), tuple(held), tuple(servers[:-1]))


def _gpus(cluster: Cluster, job: str) -> int:
    found = cluster.job(job)
    assert found is not None
    return found.spec.gpus_per_node


def simulated(
    setting: EpisodeSetting, sequence: Sequence[int], policy: str, arrays: Arrays, held_h: Sequence[float] | None = None
) -> Episode:
    """The same episode in the replay engine, under the agent or first fit; ``held_h``: in place of the run times."""
    trace = setting.trace(list(sequence))
    if held_h is not None:
        trace = replace(trace, duration=np.array(held_h) * HOUR_S)
    own: ReplayPolicy | str = "fifo-skip"
    if policy == "agent":
        model = model_of(setting, arrays)
        own = ReplayPolicy(name="agent", order="gist", knows="limit", source="", backfill="easy", model=model)
    result = replay(trace, setting.pool, own, placement=None if policy == "agent" else "first-fit")
    start, end = result.start / HOUR_S, result.end / HOUR_S
    hours = float(end.max() - start.min())
    work = float(np.sum(trace.gpus / 16.0 * (end - start)))
    servers = tuple(int(result.nodes_of(job)[0]) for job in range(len(sequence)))
    return Episode(work / hours, hours, tuple((start - start.min()).tolist()), tuple((end - start).tolist()), servers)
