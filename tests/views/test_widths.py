"""Every table at 60, 80 and 140 columns and in a pipe: no word, name or number is cut; what is left out is named."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Some

import pytest
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType

import gpusched.views
from gpusched.agents.common.request import ResultRow as TrainedRow
from gpusched.agents.predictor.request import PredictedJob
from gpusched.cli.output import PIPE_WIDTH
from gpusched.doctor.findings import Finding
from gpusched.model.jobs import Allocation, JobRecord, JobSpec, JobState, NodeAllocation
from gpusched.model.readings import GpuState, NodeState
from gpusched.model.reports import (
    FlavorRow,
    GpuRow,
    HeldIdle,
    NodeRow,
    PowerReport,
    PowerRow,
    QosRow,
    QuotaReport,
    QuotaRow,
    ReservationRow,
    ShareRow,
)
from gpusched.sched.explain import NodeVerdict
from gpusched.views import check, jobs, nodes, policy, power, predict, quota, replay, reservations, training, why
from gpusched.views.common import WHOLE
from gpusched.views.tables import FittedTable

NOW = 1.78e9
USER, GROUP, PARTITION = "alexandra.konstantinou", "molecular-dynamics-lab", "a100-80g-interactive"
NODES = [f"gpu-node-{i:03}" for i in (1, 2, 3, 7, 19, 40)]
SENTENCE = "waits for 8 GPUs on one node of those it may use; most free on one node: 3 (gpu-node-019)"


def _status() -> RenderableType:
    spec = JobSpec(name="train-llama-70b-instruct-finetune-eu", partition=PARTITION, flavor="f-a100-whole", nodes=6,
                   gpus_per_node=8, cores_per_node=64, memory_mib_per_node=1 << 19,
                   time_limit_s=14 * 86400)  # fmt: skip
    parts = tuple(
        NodeAllocation(rank=i, node=name, gpus=tuple(range(8)), cores=8, memory_mib=8) for i, name in enumerate(NODES)
    )
    shown = [
        JobRecord(id="1qm1fn93mee", user=USER, uid=1, spec=spec, state=JobState.RUNNING, submit_time=NOW - 1e6,
            start_time=NOW - 1e6, allocation=Allocation("1qm1fn93mee", parts)),
        JobRecord(id="1qm1fn93mef_0", array_id="1qm1fn93mef", array_index=0, tasks=((0, 4), (9, 99_999)), user=USER,
        uid=1,
            spec=spec, state=JobState.PENDING, submit_time=NOW, reason="AssocMaxWallDurationPerJobLimit"),
    ]  # fmt: skip
    return jobs.status_table(jobs.Listing(now=NOW, jobs=tuple(shown)), WIDTH[0])


def _node_rows() -> list[NodeRow]:
    gpus = tuple(
        GpuRow(index=i, name="NVIDIA A100-SXM4-80GB", state=GpuState.ALLOCATED if i else GpuState.LOST, user=USER,
               job=f"1qm1fn93me{i}_99999", reason="" if i else "GPU is lost: Unable to determine the device handle",
               utilization_pct=97, memory_total_mib=81_920, memory_used_mib=80_001, power_w=399, power_limit_w=400,
               temperature_c=88)
        for i in range(8)
    )  # fmt: skip
    fields = {"cores_total": 256, "cores_free": 128, "memory_total_mib": 2 << 20, "memory_free_mib": 1 << 20}
    fields |= {"power_w": 3120.0, "power_limit_w": 3200.0, "gpus_total": 8, "gpus_free": 7, "gpus": gpus}
    more = {"partition": PARTITION, "state": NodeState.DRAINED, "source": "simulated", "reason": f"drained by {USER}"}
    known = {field for field in NodeRow.__struct_fields__}
    return [NodeRow(name=name, **{k: v for k, v in (fields | more).items() if k in known}) for name in NODES[:2]]


def _power(by: str) -> RenderableType:
    row = PowerRow(name={"user": USER, "job": "1qm1fn93mee_99999", "node": NODES[0]}.get(by, PARTITION), user=USER,
                   partition=PARTITION, hours=720.0, gpu_hours=123_456.7, utilization=0.987, measured_utilization=0.876,
                   idle_gpu_hours=12_345.6, energy_kwh=98_765.4, energy_unknown_share=0.2, rated_kwh=123_456.0,
                   inefficient_kwh=23_456.0, inefficient_cost=5_432.1, cost=32_109.8)  # fmt: skip
    idle = HeldIdle(job="1qm1fn93mee", name="train-llama-70b-instruct-finetune-eu", user=USER, partition=PARTITION,
                    nodes=tuple(NODES), gpus=48, idle_gpus=40, idle_s=1e6)  # fmt: skip
    report = PowerReport(since=NOW - 1e6, until=NOW, by=by, currency="EUR", price_per_kwh=0.3, rows=(row,),  # type: ignore[arg-type]
                         total=row, unheld_kwh=1.0, held_idle=(idle,))  # fmt: skip
    return power.power_screen(report, WIDTH[0])


def _quota() -> RenderableType:
    rows = [
        QuotaRow(subject=f"user {USER} in class interactive", resource="gpu_hours", used=123_456.7, limit=999_999.0,
                 reason="QOSMaxGRESMinutesPerUser"),
        QuotaRow(subject=f"group {GROUP}", resource="gpus", used=1024, limit=1024, reason="AssocGrpGRES",
                 frees=NOW + 3600),
        QuotaRow(subject="group physics", resource="time", used=None, limit=864_000,
                 reason="AssocMaxWallDurationPerJobLimit"),
    ]  # fmt: skip
    classes = (QosRow(name="interactive-express", priority=100_000, preemptible=None, exempt=False),)
    shares = (ShareRow(group=GROUP, user=USER, shares=100, gpu_hours=123_456.7, place=1234),)
    return quota.quota_screen(QuotaReport(users=(USER,), rows=tuple(rows), classes=classes, shares=shares, now=NOW))


def _reservations() -> RenderableType:
    row = ReservationRow(name="maintenance-of-the-fabric-2026", kind="maintenance", state="planned", nodes=tuple(NODES),
                         gpus=320, begin=NOW + 1e6, end=NOW + 2e6, users=(USER, "bob"), groups=(GROUP,),
                         reason="the switches of the second row get new firmware", running=("a",) * 12,
                         late=("1qm1fn93mee", "1qm1fn93mef_99999"))  # fmt: skip
    return reservations.reservations_screen([row])


def _policies() -> RenderableType:
    row = policy.PolicyRow(name="rltune-with-preemption", partition=PARTITION, state="live", version="9f3a2b1c7d6e",
                           agent="rltune", trained_at="2026-11-20T18:00:00Z", verdict="12.3 % better over 14 days",
                           note="asked beside the live policy", fallback="its weights cannot be read")  # fmt: skip
    change = policy.ChangeRow(time="2026-11-20T18:00:00Z", partition=PARTITION, act="promote", user=USER,
                              from_name="fifo-easy", from_version="1a2b3c4d5e6f", name="rltune-with-preemption",
                              version="9f3a2b1c7d6e", forced=True, reason="no held-out days yet",
                              verdict=None)  # fmt: skip
    verdict = Some(partition=PARTITION, jobs=123_456, days=14, incumbent="fifo-easy", incumbent_version="1a2b3c4d5e6f",
                   candidate="rltune-with-preemption", candidate_version="9f3a2b1c7d6e", incumbent_mean_jct_s=5e5,
                   candidate_mean_jct_s=4e5, gain=0.123, low=0.1, high=0.15)  # fmt: skip
    starts = {"1qm1fn93mee": tuple(NODES), "1qm1fn93mef_99999": ()}
    difference = Some(time=NOW, partition=PARTITION, live=starts, shadow=starts)
    return Group(policy.table([row]), policy.change_table([change]), policy.verdict_table([verdict]),  # type: ignore[list-item]
                 policy._difference_table([difference]))  # type: ignore[list-item]  # fmt: skip


def _replay() -> RenderableType:
    names = ("jobs", "mean_jct_s", "p95_jct_s", "mean_wait_s", "p95_wait_s", "mean_bounded_slowdown", "makespan_s",
             "utilization", "fragmentation", "jain", "energy_kwh", "inefficient_energy_kwh")  # fmt: skip
    holder = Some(name=USER, jobs=1_234_567, gpu_hours=98_765.4, mean_jct_s=1e6, mean_wait_s=1e5,
                  mean_bounded_slowdown=1234.5)  # fmt: skip
    metrics = Some(**{name: 1_234_567 if name == "jobs" else 0.987 * 10**i for i, name in enumerate(names)},
                   users=(holder,), groups=())  # fmt: skip
    result = Some(policy="rltune-with-preemption+conservative", knows="estimate", jobs_per_s=1e6, seed=0,
                  trace=Some(name="t"))  # fmt: skip
    outcome = Some(metrics=metrics, gap_to_bound=8.87, result=result)
    return Group(replay.table([outcome]), replay._holders(outcome, "user"))  # type: ignore[arg-type, list-item]


def _learned() -> RenderableType:
    predicted = PredictedJob(id="1qm1fn93mee_99999", p5_s=1e3, p25_s=2e3, p50_s=1e4, p75_s=1e5, p95_s=1e6,
                        limit_s=1e6, run_s=1e5)  # fmt: skip
    evaluation = Some(rows=[Some(estimate="the limit asked for", jobs=123_456, log_error=0.123, low=0.1, high=0.2,
                                 bias=-0.05, under=0.5, over=0.2, within_2=0.8, wait_s=1e5)], jobs=123_456,
                      days=14, covered_50=0.5, covered_90=0.9, crps=0.5)  # fmt: skip
    rows = [TrainedRow(policy="rltune-with-preemption", knows="estimate", figure="mean_jct_s", value=5e5, low=4e5,
                       high=6e5, mean_wait_s=1e5, utilization=0.987, change=-0.123, change_low=-0.2,
                       change_high=-0.05)]  # fmt: skip
    return Group(predict.jobs_table([predicted]), *predict._evaluation(evaluation), training._table(rows))  # type: ignore[arg-type]


def _found() -> RenderableType:
    message = "the container engine podman 3.4.4 is older than 4.1 and cannot hand on GPUs by CDI"
    return check.findings_screen([Finding(NODES[0], "runtime", "fail", message, "install podman 4.1 or docker 24")])


WIDTH = [0]
SCREENS: dict[str, Callable[[], RenderableType]] = {
    "status": _status,
    "nodes": lambda: nodes.nodes_screen(_node_rows(), WIDTH[0]),
    "nodes --gpus": lambda: nodes.nodes_screen(_node_rows(), WIDTH[0], detail=True),
    "flavors": lambda: nodes.flavors_screen(
        [FlavorRow(partition=PARTITION, flavor="f-a100-whole", gpus=8, cores=256, memory_mib=2 << 20,
                   time_limit_s=14 * 86400, nodes=16, share=0.00123, free_now=128)]),
    "why": lambda: why._node_table((NodeVerdict(node=NODES[0], fits=False, text=SENTENCE),)),
    "power --by user": lambda: _power("user"),
    "power --by job": lambda: _power("job"),
    "power --by partition": lambda: _power("partition"),
    "quota": _quota,
    "reservations": _reservations,
    "policy": _policies,
    "replay": _replay,
    "train, predict": _learned,
    "check": _found,
}  # fmt: skip


def _shown(what: RenderableType, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, color_system=None).print(what)
    return out.getvalue()


def _tables(what: RenderableType) -> list[FittedTable]:
    if isinstance(what, Group):
        return [table for part in what.renderables for table in _tables(part)]
    return [what] if isinstance(what, FittedTable) else []


def _words(text: str) -> set[str]:
    return {word for part in text.split() for word in re.split(r"(?<=,)", part) if word}


@pytest.mark.parametrize("width", [60, 80, 140, PIPE_WIDTH])
@pytest.mark.parametrize("name", SCREENS)
def test_nothing_is_cut_and_what_is_left_out_is_named(name: str, width: int) -> None:
    WIDTH[0] = width
    tables = _tables(SCREENS[name]())
    assert tables
    for table in tables:
        shown = _shown(table, width)
        assert all(len(line) <= width for line in shown.splitlines())
        body, _, gone = shown.partition("columns not shown: ")
        dropped = gone.partition(";")[0].replace("\n", " ").split(", ") if gone else []
        assert set(dropped) <= set(table._drop)
        assert table._names[0] not in table._drop
        found = _words(body)
        cells = {
            word
            for row in table._cells
            for column, cell in zip(table._names, row, strict=True)
            if column not in dropped and (column not in table._max_widths or width >= WHOLE)
            for word in _words(cell.plain)
        }
        assert cells <= found, f"cut at {width}: {cells - found}\n{shown}"
        if width >= WHOLE:
            assert not dropped
            assert "…" not in shown
            assert len(body.splitlines()) == len(table._cells) + table.show_header + shown.count("→")


def test_columns_go_in_the_declared_order_before_rows_become_blocks() -> None:
    table = FittedTable(("ID", "TEXT", "N", "M"), right=("N", "M"), wrap=("TEXT",), drop=("M", "N"))
    table.add_row("identifier-1", "some words, in a line", "123", "4567")
    lines = {width: _shown(table, width).splitlines() for width in (60, 35, 34, 28, 23)}
    assert lines[60] == [
        "ID            TEXT                     N     M",
        "identifier-1  some words, in a line  123  4567",
    ]
    assert [line.split() for line in lines[35]] == [
        ["ID", "TEXT", "N", "M"], ["identifier-1", "some", "123", "4567"], ["words,", "in"], ["a", "line"],
    ]  # fmt: skip
    assert lines[34][0].split() == ["ID", "TEXT", "N"]
    assert "columns not shown: M;" in " ".join(lines[34])
    assert lines[28][0].split() == ["ID", "TEXT"]
    assert "columns not shown: M, N;" in " ".join(lines[28])
    assert lines[23] == ["ID    identifier-1", "TEXT  some words, in a", "      line", "N     123", "M     4567"]


def test_characters_of_two_columns_are_not_cut() -> None:
    table = FittedTable(("ID", "WHY"), wrap=("WHY",))
    table.add_row("a", "🚀" * 30 + " 日本語の説明が長い説明 words")
    for width in (20, 30, 45, 80):
        shown = _shown(table, width)
        assert shown.count("🚀") == 30
        assert all(cell_len(line) <= width for line in shown.splitlines())


def test_a_name_is_shortened_before_its_column_is_left_out() -> None:
    table = FittedTable(("ID", "NAME", "N"), drop=("NAME", "N"), max_widths={"NAME": 24})
    table.add_row("identifier-1", "a-name-of-twenty-two-c", "1")
    assert _shown(table, 30).splitlines()[1] == "identifier-1  a-name-of-tw…  1"
    assert "columns not shown: NAME;" in " ".join(_shown(table, 28).splitlines())


def test_a_block_has_no_lines_for_what_is_not_there() -> None:
    table = FittedTable(("ID", "TEXT"), wrap=("TEXT",))
    table.add_row("identifier-1", "")
    table.add_row("identifier-2", "words")
    shown = _shown(table, 15).splitlines()
    assert shown == ["ID    identifie", "      r-1", "", "ID    identifie", "      r-2", "TEXT  words"]


@pytest.mark.parametrize("width", [60, 80])
def test_when_a_quota_frees_is_never_left_out(width: int) -> None:
    (limits, *_) = _tables(_quota())
    shown = _shown(limits, width)
    assert "FREES WITHIN" in shown
    assert "1:00:00" in shown


def test_parts_of_gpus_are_not_rounded_to_whole_ones() -> None:
    """Three of seven slices are in use, and no whole GPU is left."""
    rows = (
        QuotaRow(subject="user ann", resource="gpus", used=3 / 7, limit=1, reason="AssocGrpGRES"),
        QuotaRow(subject="user bob", resource="gpus", used=7 * (1 / 7), limit=1, reason="AssocGrpGRES"),
    )
    out = io.StringIO()
    report = QuotaReport(users=(), rows=rows, classes=(), shares=(), now=NOW)
    Console(file=out, width=140).print(quota.quota_screen(report))
    figures = [re.findall(r" ([0-9.]+)(?= )", line) for line in out.getvalue().splitlines()[1:3]]
    assert figures == [["0.43", "1", "0.57"], ["1", "1", "0"]]


def test_an_array_with_many_gaps_costs_the_other_jobs_no_columns() -> None:
    spec = JobSpec(name="j", partition="p", gpus_per_node=1, cores_per_node=1, memory_mib_per_node=1, time_limit_s=60)
    gaps = tuple((2 * i, 2 * i) for i in range(500))
    both = [
        JobRecord(id="1qm1fn93mee", user="ann", uid=1, spec=spec, state=JobState.PENDING, submit_time=NOW,
        reason="Priority"),
        JobRecord(id="1qm1fn93mef_0", array_id="1qm1fn93mef", array_index=0, tasks=gaps, user="ann", uid=1, spec=spec,
            state=JobState.PENDING, submit_time=NOW, reason="Priority"),
    ]  # fmt: skip
    alone, beside = (
        _shown(jobs.status_table(jobs.Listing(now=NOW, jobs=tuple(some)), 80), 80) for some in (both[:1], both)
    )
    assert "1qm1fn93mef_[0,2,4,6,8…]" in beside
    assert "columns not shown: FLAVOR;" in alone
    assert "columns not shown: FLAVOR, LIMIT, PARTITION;" in beside


def test_a_table_is_made_in_one_place() -> None:
    """So that none escapes the test above: no Rich table is made."""
    folder = Path(gpusched.views.__path__[0])
    makers = [p.name for p in folder.glob("*.py") if re.search(r"[^\w.]Table\(", p.read_text())]
    assert makers == []
