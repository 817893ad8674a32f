"""The paper's own network in charge: as in its training, the same live and in replays, sound, and where it is none."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.agents.gist.clusters import Clusters
from gpusched.agents.gist.setting import EpisodeSetting, paper, tables_of
from gpusched.config.weights import Arrays, TrainedModel
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.plan import Plan, ReasonCode
from gpusched.model.policy import PolicySpec
from gpusched.model.slices import slice_index
from gpusched.model.slicetables import PUBLISHED
from gpusched.model.snapshot import NodeView, PendingView, RunningView, SliceView, Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.traces.readers.draft import assemble
from gpusched.traces.trace import Trace
from tests.sched.gist_decisions import EASY, GIST, live_at
from tests.sched.worlds import NOW, node, pending, running, snapshot, started
from tests.strategies import among

TOY = EpisodeSetting(
    "p", (NodeSpec(8, 64, 1 << 20), NodeSpec(8, 64, 1 << 20)),
    tuple(k._replace(cores=8 * k.gpus, memory_mib=1024 * k.gpus) for k in paper("A100").kinds),
)  # fmt: skip
"""Two of the nodes of `tests.sched.worlds`, with flavors of 2, 4 and 8 GPUs."""
ANSWERS = 9  # three flavors on two servers, and three queues


def model(
    arrays: Arrays, variant: str = "masked", setting: EpisodeSetting = TOY, patience_days: float = 7.0
) -> TrainedModel:
    about = {"variant": variant, "patience_s": str(patience_days * 86400)}
    return TrainedModel("gist", {**arrays, **tables_of(setting)}, about, "", f"here {id(arrays)}")


def drawn(seed: int, queues: float = 0.0) -> Arrays:
    """A network of no sense at all. ``queues``: how much it likes to let jobs wait."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for i, (inputs, outputs) in enumerate(((6, 12), (12, ANSWERS))):
        arrays[f"q.{i}.weight"] = rng.normal(size=(outputs, inputs)).astype(np.float32)
        arrays[f"q.{i}.bias"] = rng.normal(size=outputs).astype(np.float32)
    arrays["q.1.bias"][-3:] += np.float32(queues)
    return arrays


def by_bias(*biases: float) -> Arrays:
    """A network that always answers the same."""
    return {"q.0.weight": np.zeros((ANSWERS, 6), np.float32), "q.0.bias": np.array(biases, np.float32)}


WILD = [
    model(drawn(seed, queues), variant)
    for seed, (variant, queues) in enumerate((("masked", -3.0), ("masked", 0.0), ("masked", 3.0), ("paper", 0.0)))
]
FIRST, SECOND = by_bias(*[1, 0] * 3, -1, -1, -1), by_bias(*[0, 1] * 3, -1, -1, -1)


def by_agent(snap: Snapshot, of: TrainedModel) -> Plan:
    return decide(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, GIST)), {"p": of})


def nodes() -> list[NodeView]:
    return [msgspec.structs.replace(node(name), cores=64, memory_mib=1 << 20) for name in ("a", "b")]


def two(jobs: list[PendingView], busy: list[RunningView] = []) -> Snapshot:  # noqa: B006 (never changed)
    return snapshot(nodes(), jobs, busy)


def replayed(trace: Trace, of: TrainedModel, pool: Pool = TOY.pool, spec: PolicySpec | None = None):
    policy = ReplayPolicy(name="g", order="gist", knows="limit", source="", backfill="easy", model=of, spec=spec)
    return replay(trace, pool, policy)


@pytest.mark.parametrize("gap_h", [0.0, 24.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_starts_the_jobs_of_an_episode_as_in_training(seed: int, gap_h: float) -> None:
    """All 81 sequences of the paper, with an agent that never waits; U and hours are those of training."""
    setting = paper("A100", gap_h)
    of = model(drawn(seed, -1e4), setting=setting, patience_days=90)
    clusters = Clusters(setting, "masked", 81, 0, setting.sequences())
    batch = clusters.begin()
    while (batch.job >= 0).any():
        hidden = np.maximum(batch.observation @ of.arrays["q.0.weight"].T + of.arrays["q.0.bias"], 0)
        q = hidden @ of.arrays["q.1.weight"].T + of.arrays["q.1.bias"]
        clusters.step(np.where(batch.mask > 0, q, -np.inf).argmax(axis=1))
    servers: set[tuple[int, ...]] = set()
    for episode, sequence in enumerate(setting.sequences().tolist()):
        result = replayed(setting.trace(sequence), of, setting.pool)
        assert result.start.tolist() == batch.sim.state["start"][episode].tolist()
        assert (result.end.max() - result.start.min()) / 3600 == batch.hours[episode]
        chosen = [int(result.nodes_of(job)[0]) for job in range(4)]
        assert chosen == batch.sim.held[episode, :4].tolist()
        servers.add(tuple(chosen))
    assert len(servers) > 3, "this network has no preference for a server"


@st.composite
def workloads(draw: st.DrawFn) -> Trace:
    """Jobs of the flavors, of other sizes, and of both servers; limits and waits up to ten days."""
    rows, at = [], 0.0
    for _ in range(draw(st.integers(1, 20))):
        at += draw(among(0.0, 0.0, 60.0, 3000.0, 90_000.0))
        run = draw(among(600.0, 7200.0, 400_000.0))
        gpus, cores = draw(among((2, 16), (4, 32), (8, 64), (4, 8), (3, 24), (1, 1), (16, 128)))
        rows.append((at, run, run * draw(among(1, 2)), gpus, cores, 512))
    submit, run_s, limits, gpus, cores, memory = (np.array(column) for column in zip(*rows, strict=True))
    return assemble(
        name="t", epoch=None, ids=tuple(f"j{i:02}" for i in range(len(rows))), submit=submit, duration=run_s, gpus=gpus,
        names={}, columns={"limit": limits, "cores": cores, "memory_mib": memory},
    )  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), st.sampled_from(WILD))
def test_live_and_replay_choose_the_same_and_the_plan_is_sound(trace: Trace, wild: TrainedModel) -> None:
    """At every instant of a replay: the same jobs in the same order on the same servers, within what there is."""
    result = replayed(trace, wild)
    assert result.ran.all(), "no job waits for ever"
    for now in np.unique(result.events.time).tolist():
        snap = live_at(result, now)
        plan = by_agent(snap, wild)
        assert plan.troubles == {}
        assert check(plan, snap)[1] == ()
        new = np.flatnonzero(result.start == now).tolist()
        expected = {trace.ids[j]: [result.pool.names[n] for n in result.nodes_of(j).tolist()] for j in new}
        assert {job: [name for name, _ in parts] for job, parts in started(plan).items()} == expected


def test_the_network_chooses_the_server_and_larger_jobs_go_first() -> None:
    snap = two([pending("s", 2), pending("l", 8)])
    for arrays, servers in ((FIRST, {"l": "a", "s": "b"}), (SECOND, {"l": "b", "s": "a"})):
        plan = by_agent(snap, model(arrays))
        assert {job: where[0][0] for job, where in started(plan).items()} == servers
        assert list(started(plan)) == ["l", "s"]


def test_priorities_go_before_sizes() -> None:
    plan = by_agent(two([pending("l", 8), pending("s", 2, priority=1)]), model(FIRST))
    assert list(started(plan)) == ["s", "l"]


def test_it_may_keep_a_job_of_a_flavor_waiting_but_never_with_nothing_running_nor_for_ever() -> None:
    queues = model(by_bias(*[0.0] * 6, 1, 1, 1))
    busy = [running("r", {"a": (0,)}, NOW + 60)]
    plan = by_agent(two([pending("j", 2), pending("other", 3)], busy), queues)
    assert list(started(plan)) == ["other"], "the network knows no such flavor"
    assert plan.reasons["j"].code == ReasonCode.POLICY
    assert list(started(by_agent(two([pending("j", 2)]), queues))) == ["j"]
    old = two([pending("j", 2, submit=NOW - 8 * 86400)], busy)
    assert list(started(by_agent(old, queues))) == ["j"], "its patience is at an end"


def test_a_penalized_agent_that_chooses_a_full_server_makes_the_job_wait() -> None:
    busy = [running("r", {"a": tuple(range(8))}, NOW + 60)]
    snap = two([pending("j", 4)], busy)
    assert by_agent(snap, model(FIRST, "paper")).reasons["j"].code == ReasonCode.POLICY
    assert [n for n, _ in started(by_agent(snap, model(FIRST)))["j"]] == ["b"]


def test_a_job_of_all_servers_comes_last_until_it_has_waited_too_long() -> None:
    busy = [running("r", {"a": (0, 1)}, NOW + 60)]
    small = [pending(f"s{i}", 2, limit=3600) for i in range(3)]
    young = two([pending("f", 8, nodes=2), *small], busy)
    assert sorted(started(by_agent(young, model(FIRST)))) == ["s0", "s1", "s2"]
    old = two([pending("f", 8, nodes=2, submit=NOW - 8 * 86400), *small], busy)
    assert started(by_agent(old, model(FIRST))) == {}, "both servers are reserved for it"


def test_elsewhere_the_fallback_decides_and_says_why() -> None:
    jobs = [pending("s", 2), pending("l", 8)]
    elsewhere = (
        (snapshot([*nodes(), msgspec.structs.replace(node("c"), cores=64, memory_mib=1 << 20)], jobs), "3 servers"),
        (snapshot(nodes()[:1], jobs), "1 server ("),
        (snapshot([msgspec.structs.replace(n, cores=32) for n in nodes()], jobs), "8 GPUs, 32 cores"),
    )
    for snap, has in elsewhere:
        plain = decide(msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, EASY)))
        plan = by_agent(snap, model(SECOND))
        assert plan.actions == plain.actions
        (line,) = plan.troubles.values()
        assert line.startswith("its weights are for 2 servers (8 GPUs, 64 cores, 1048576 MiB), and this partition has")
        assert has in line


def test_a_server_that_is_down_looks_full() -> None:
    down = [nodes()[0], msgspec.structs.replace(nodes()[1], available=False, unavailable_reason="DOWN")]
    plan = by_agent(snapshot(down, [pending("j", 2)]), model(SECOND))
    assert plan.troubles == {}
    assert [n for n, _ in started(plan)["j"]] == ["a"]


@pytest.mark.parametrize(
    ("about", "drop", "line"),
    [
        ("wait", "", "these are weights of the wait variant, which must know how many jobs are still to come"),
        ("masked", "flavors", "these weights do not say which servers and flavors they are for; train them again"),
        ("masked", "q.1.bias", "layer 1 of q is 9x12"),
    ],
)
def test_weights_that_cannot_decide_say_why(about: str, drop: str, line: str) -> None:
    of = model(drawn(1), about)
    of = replace(of, arrays={name: array for name, array in of.arrays.items() if name != drop})
    plan = by_agent(two([pending("j", 2)]), of)
    assert list(started(plan)) == ["j"]
    assert line in plan.troubles["p"]


def test_a_replay_elsewhere_is_refused() -> None:
    with pytest.raises(UsageError, match=r"its weights are for 2 servers .*, and this partition has 3 servers"):
        replayed(TOY.trace([0]), WILD[0], Pool.of([TOY.servers[0]] * 3))


@pytest.mark.parametrize("on_demand", [False, True])
def test_a_replay_with_jobs_in_slices_is_refused(on_demand: bool) -> None:
    """Where GPUs are cut into slices beforehand, and where live decisions are replayed since they are cut on demand."""
    table = PUBLISHED["A100-80GB"]
    slices = tuple(SliceView(slice_index(7, start), "1g.10gb") for start in range(7))
    more = {"cuttable": ((7, table),)} if on_demand else {"slices": slices}
    pool = Pool.of([server._replace(**more) for server in TOY.servers])
    trace = TOY.trace([0, 0])
    trace = replace(trace, gpus=np.array([2, 1]), cores=np.array([16, 1]))
    trace = replace(trace, profile=np.array([-1, 0]), profiles=("1g.10gb",))
    with pytest.raises(GpuschedError, match=r"about whole GPUs only, and jobs ask for MIG slices of 1g\.10gb"):
        replayed(trace, WILD[0], pool, spec=GIST)


def test_a_network_whose_answer_is_no_number_decides_nothing() -> None:
    huge = {name: np.full_like(array, 3e38) for name, array in drawn(0).items()}
    assert "returned NaN" in by_agent(two([pending("j", 2)]), model(huge)).troubles["p"]
