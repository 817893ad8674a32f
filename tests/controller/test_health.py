"""Conditions of GPUs: what a reading makes of them, when they begin, when they are over, what follows."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from gpusched.controller.health import HealthChange, Judgement, forgiven, judge_gpu, observe_health
from gpusched.model.gpustates import gpu_states
from gpusched.model.health import (
    KINDS,
    XIDS,
    Condition,
    GpuCounters,
    HealthAction,
    NodeHealth,
    out_of_service,
    to_requeue,
)
from gpusched.model.readings import Gpu, GpuHealth, GpuProcess, GpuState, KernelLog, NodeReading, XidMessage
from gpusched.model.resources import Node
from gpusched.nodes.parse_reading import parse_messages

NOW, TICK = 1_800_000_000.0, 5.0
FINE = GpuHealth(
    retired_pages=0, remap_pending=False, remap_failed=False, nvlinks=12, nvlink_errors=3, nvlink_recoveries=0,
    pcie_replays=2, pcie_width=16, clocks=1, recovery=0,
)  # fmt: skip
NODE = Node(
    name="n0", partition="p", address="n0", gpus=8, cores=8, memory_mib=1024, runtime="process", gpu_type="A100"
)  # fmt: skip


def gpu(index: int, time: float = NOW, **changes: Any) -> Gpu:
    """A healthy GPU; changes of its health by the names of `GpuHealth`."""
    own = {name: changes.pop(name) for name in list(changes) if name in GpuHealth.__struct_fields__}
    health = msgspec.structs.replace(FINE, bus=f"0000:{7 + 8 * index:02x}:00", **own)
    fields = {"energy_j": time, "temperature_c": 60, "utilization_pct": 90.0, "ecc_errors": 0, "health": health}
    return Gpu(**{"index": index, "uuid": f"u{index}", "name": "x"} | fields | changes)


class Probes:
    """A node that is probed again and again; one GPU, the fourth, may be changed, or messages appear."""

    def __init__(self, node: Node = NODE, held: dict[int, tuple[str, ...]] | None = None) -> None:
        self.node, self.held = node, held or {}
        self.health, self.now, self.boot = NodeHealth(), NOW, "b1"
        self.events: list[tuple[str, str, int | None]] = []
        self.last: HealthChange | None = None
        self.readable = True  # the kernel's log

    def probe(
        self, xids: tuple[XidMessage, ...] = (), after_s: float = TICK, lost: str = "", gpus: int = 8, **changes: Any
    ) -> set[str]:
        """One reading, with these changes of GPU 3; return the kinds of conditions there are."""
        self.now += after_s
        found = [gpu(i, self.now, **(changes if i == 3 else {})) for i in range(gpus)]
        if lost:
            found[3] = Gpu(index=3, uuid="u3", error=lost)
        log = KernelLog(source="kernel", now_us=self.us(), messages=xids) if self.readable else KernelLog()
        reading = NodeReading(
            node="n0", time=self.now, boot_id=self.boot, source="nvml", gpus=tuple(found), containers=(), kernel=log
        )
        self.last = observe_health(self.health, self.node, reading, self.held, self.now, dict)
        self.health = self.last.health
        self.events += [(e.kind, e.data["condition"], e.data["gpu"]) for e in self.last.events]
        return self.kinds()

    def us(self) -> int:
        return int((self.now - NOW + 10_000) * 1e6)

    def kinds(self) -> set[str]:
        return {c.kind for c in self.health.conditions}

    def xid(self, number: int, bus: str = "0000:1f:00", **changes: Any) -> tuple[XidMessage, ...]:
        """A message that appears now."""
        return (XidMessage(at_us=self.us() + 1000, number=number, bus=bus, **changes),)


LEVELS: list[tuple[str, dict[str, Any]]] = [
    ("off-bus", {"lost": "NVML: GPU is lost"}),
    ("needs-reset", {"recovery": 1}),
    ("ecc", {"ecc_errors": 2}),
    ("remap-pending", {"remap_pending": True}),
    ("remap-failed", {"remap_failed": True}),
    ("pages-retired", {"retired_pages": 60}),
    ("nvlink-down", {"nvlinks": 11}),
    ("pcie-width", {"pcie_width": 8, "pcie_width_max": 16}),
    ("pcie-speed", {"pcie_gen": 3, "pcie_gen_max": 5}),
    ("clocks-thermal", {"clocks": 0x40}),
    ("clocks-power", {"clocks": 0x80}),
    ("temperature", {"thermal_margin_c": 2, "temperature_c": 89}),
]
RISES: list[tuple[str, dict[str, Any]]] = [
    ("nvlink-errors", {"nvlink_recoveries": 1}),
    ("nvlink-errors", {"nvlink_errors": 103}),
    ("pcie-replays", {"pcie_replays": 10}),
]


@pytest.mark.parametrize(("kind", "changes"), LEVELS + RISES, ids=lambda v: v if isinstance(v, str) else "")
def test_nvml_readings_become_conditions_within_two_probes(kind: str, changes: dict[str, Any]) -> None:
    probes = Probes()
    assert probes.probe() == set()
    first = probes.probe(**changes)
    assert first | probes.probe(**changes) == {kind}
    (found,) = probes.health.conditions
    assert (found.gpu, found.index, found.stays) == ("u3", 3, False)
    assert found.since == NOW + 2 * TICK  # when it was first seen, though it took two
    assert probes.events == [("condition", kind, 3)]


@pytest.mark.parametrize(("kind", "changes"), LEVELS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_condition_ends_some_time_after_it_clears(kind: str, changes: dict[str, Any]) -> None:
    probes = Probes()
    for _ in range(4):
        probes.probe(**changes)
    if kind == "nvlink-down":  # what was never up is not down
        assert probes.kinds() == set()
        return
    fine = {"pcie_gen": 5, "pcie_gen_max": 5} if kind == "pcie-speed" else {}
    over_s = 10 if kind == "off-bus" else 300
    assert probes.probe(after_s=over_s - 1, **fine) == {kind}
    assert probes.probe(after_s=2, **fine) == set()
    assert probes.events[-1] == ("condition_over", kind, 3)


def test_a_single_odd_reading_is_no_condition() -> None:
    twice = [(kind, changes) for kind, changes in LEVELS if next(k for k in KINDS if k.name == kind).needs_two]
    assert len(twice) == 7
    probes = Probes()
    probes.probe()
    for _, changes in twice:
        assert probes.probe(**changes) == set()
        assert probes.probe() == set()
    probes.probe(lost="NVML did not answer in 4 s")
    assert probes.probe(lost="NVML did not answer in 4 s", after_s=0.2) == set()  # a wake-up, not a second reading
    assert probes.probe(lost="NVML did not answer in 4 s") == {"off-bus"}


def test_values_that_nvml_does_not_support_are_unknown() -> None:
    probes = Probes()
    assert probes.probe(health=None, ecc_errors=None, temperature_c=None) == set()
    probes.probe(pcie_width=8, pcie_width_max=16)
    probes.probe(pcie_width=8, pcie_width_max=16)
    assert probes.kinds() == {"pcie-width"}
    assert probes.probe(pcie_width=None, after_s=400) == {"pcie-width"}  # unknown: neither seen nor fine
    assert probes.probe(gpus=0) == {"pcie-width"}
    assert probes.probe() == set()


@pytest.mark.parametrize(
    ("source", "error", "listed", "lost"),
    [
        ("nvml", None, 7, True), ("nvidia-smi", None, 7, True), ("simulated", None, 7, False), ("none", None, 7, False),
        ("nvml", None, 0, True), ("nvml", "version mismatch", 0, False), ("nvidia-smi", "no python3", 7, True),
    ],
)  # fmt: skip
def test_a_gpu_that_is_not_listed_is_lost_unless_none_could_be(
    source: str, error: str | None, listed: int, lost: bool
) -> None:
    gpus = tuple(gpu(i) for i in range(listed))
    reading = NodeReading(node="n0", time=NOW, source=source, gpus=gpus, gpu_error=error, containers=())
    assert judge_gpu(7, None, reading, GpuCounters(uuid="u7")) == Judgement(
        7, "u7", {"off-bus": "not listed"} if lost else {}
    )
    failed = Gpu(index=7, error="GPU is lost")
    reading = msgspec.structs.replace(reading, gpus=(*gpus, failed))
    known = source in ("nvml", "nvidia-smi")
    assert judge_gpu(7, failed, reading, GpuCounters()) == Judgement(
        7, "#7", {"off-bus": "GPU is lost"} if known else {}
    )


def test_the_next_gpu_in_a_slot_begins_anew() -> None:
    probes = Probes()
    probes.probe()
    assert probes.probe(probes.xid(48)) == {"xid-gpu"}
    assert probes.probe(uuid="u9") == set()
    probes.probe(probes.xid(48), uuid="u9")
    probes.node = msgspec.structs.replace(NODE, gpus=7, gpu_indices=(0, 1, 2, 4, 5, 6, 7))
    assert probes.probe(uuid="u9") == set()  # no longer declared


def test_an_idle_gpu_with_a_slow_link_is_fine() -> None:
    probes = Probes()
    for _ in range(3):
        assert probes.probe(pcie_gen=None, pcie_gen_max=None, utilization_pct=0.0) == set()


@pytest.mark.parametrize("number", sorted(XIDS))
def test_every_xid_of_the_table_is_its_condition_at_the_first_probe(number: int) -> None:
    probes = Probes()
    probes.probe()
    assert probes.probe(probes.xid(number)) == {XIDS[number].kind}
    (found,) = probes.health.conditions
    assert f"Xid {number} (" in found.detail
    about_node = XIDS[number].kind == "xid-machine"
    assert (found.gpu, found.index) == ((None, None) if about_node else ("u3", 3))


def test_messages_count_once_though_they_are_sent_again() -> None:
    probes = Probes()
    probes.probe()
    message = probes.xid(48)
    for _ in range(3):
        probes.probe(message)
    assert probes.events == [("condition", "xid-gpu", 3)]
    probes.health = forgiven(probes.health)
    assert probes.probe(message) == set()
    assert probes.probe(probes.xid(48)) == {"xid-gpu"}


def test_an_error_of_the_gpu_stays_until_the_node_is_resumed_or_booted_or_the_gpu_reset() -> None:
    for end in ("resume", "boot", "reset"):
        probes = Probes()
        probes.probe()
        probes.probe(probes.xid(95))
        assert probes.probe(after_s=10 * 86400) == {"xid-gpu"}
        if end == "resume":
            probes.health = forgiven(probes.health)
        elif end == "boot":
            probes.boot = "b2"
        assert probes.probe(**({"energy_j": 12.0} if end == "reset" else {})) == set(), end


def test_a_program_s_error_is_reported_with_its_job_and_disables_nothing() -> None:
    probes = Probes(held={3: ("j1",), 4: ("j2",)})
    probes.probe()
    probes.probe(probes.xid(31, pid=77, process="python"))
    assert probes.last is not None
    (event,) = probes.last.events
    assert (event.job_id, event.data["detail"]) == ("j1", "Xid 31 (memory page fault), process python")
    assert out_of_service(probes.health.conditions, {}, NODE.indices()) == {}
    assert probes.probe(probes.xid(31)) == {"xid-program"}
    assert probes.last.events == []  # the same job again
    probes.held = {3: ("j3",)}
    probes.probe(probes.xid(13))
    assert [e.job_id for e in probes.last.events] == ["j3"]
    assert probes.probe(after_s=3601) == set()


@pytest.mark.parametrize(
    ("held", "job"), [({4001: ("j1",), 5000: ("j2",)}, "j1"), ({4000: ("j1",), 4001: ("j1",)}, "j1"),
                      ({4000: ("j1",), 4001: ("j2",)}, None)],
)  # fmt: skip
def test_an_error_on_a_cut_gpu_is_of_the_only_job_on_its_slices(
    held: dict[int, tuple[str, ...]], job: str | None
) -> None:
    probes = Probes(held=held)
    probes.probe()
    probes.probe(probes.xid(31))
    assert [c.job for c in probes.health.conditions] == [job]


def test_the_process_says_whose_error_it_is() -> None:
    probes = Probes(held={3: ("j1", "j2")})
    own = GpuProcess(pid=77, container="gpusched-j2-1-0")
    probes.probe(processes=(own, GpuProcess(pid=78)))
    for pid, job in ((77, "j2"), (78, None), (79, None)):
        probes.health = forgiven(probes.health)
        probes.probe(probes.xid(31, pid=pid), processes=(own, GpuProcess(pid=78)))
        assert [c.job for c in probes.health.conditions] == [job]


def test_old_messages_of_a_node_that_is_new_here_are_past() -> None:
    probes = Probes()
    old = XidMessage(at_us=probes.us() - 700_000_000, number=79, bus="0000:1f:00")
    assert probes.probe((old,)) == set()
    probes = Probes()
    recent = XidMessage(at_us=probes.us() - 100_000_000, number=79, bus="0000:1f:00")
    assert probes.probe((recent,)) == {"off-bus"}
    probes = Probes()
    probes.readable = False
    probes.probe()
    probes.readable = True  # somebody let the account read the log
    assert probes.probe((old,)) == set()
    assert probes.probe(probes.xid(79)) == {"off-bus"}


def test_after_a_boot_messages_since_the_boot_count() -> None:
    probes = Probes()
    probes.probe()
    probes.boot = "b2"
    assert probes.probe((XidMessage(at_us=5_000_000, number=48, bus="0000:1f:00"),)) == {"xid-gpu"}


def test_a_lost_gpu_is_found_by_its_address() -> None:
    probes = Probes()
    probes.probe()
    probes.probe(probes.xid(79), lost="NVML: GPU is lost")
    (found,) = probes.health.conditions
    assert (found.gpu, found.index, found.stays) == ("u3", 3, True)
    assert found.detail == "Xid 79 (the GPU has fallen off the bus)"
    state = gpu_states(NODE, None, {}, probes.health.conditions)[3]
    assert state.state is GpuState.UNKNOWN


def test_an_unknown_address_or_number_takes_nothing_out() -> None:
    probes = Probes()
    probes.probe()
    probes.probe((*probes.xid(79, bus="0000:ff:00"), *probes.xid(9999)))
    assert probes.kinds() == {"xid-other"}
    assert out_of_service(probes.health.conditions, {}, NODE.indices()) == {}
    assert probes.probe(probes.xid(63)) == {"xid-other"}  # NVML's own values say more


def test_a_fatal_error_of_a_switch_is_the_node_s() -> None:
    probes = Probes()
    probes.probe()
    assert probes.probe(probes.xid(28006, switch=True)) == set()
    assert probes.probe(probes.xid(20034, switch=True, fatal=True)) == {"nvswitch"}
    assert set(out_of_service(probes.health.conditions, {}, NODE.indices())) == set(range(8))


def test_a_gpu_that_is_out_leaves_the_other_seven() -> None:
    probes = Probes(held={3: ("j1",)})
    probes.probe()
    probes.probe(probes.xid(48))
    reading = NodeReading(node="n0", time=NOW, source="nvml", gpus=tuple(gpu(i) for i in range(8)), containers=())
    states = gpu_states(NODE, reading, probes.held, probes.health.conditions)
    assert [s.state for s in states] == [GpuState.FREE] * 3 + [GpuState.UNUSABLE] + [GpuState.FREE] * 4
    assert (states[3].reason, states[3].job_id) == ("Xid 48 (uncorrectable memory error)", "j1")


@pytest.mark.parametrize(
    ("action", "out", "requeued", "drained"),
    [("warn", False, False, False), ("no-new-jobs", True, False, False), ("drain", False, False, True),
     ("requeue", True, True, False)],
)  # fmt: skip
def test_the_operator_chooses_the_action_on_a_condition(action: str, out: bool, requeued: bool, drained: bool) -> None:
    asked = {"remap-pending": HealthAction(action)}
    probes = Probes(msgspec.structs.replace(NODE, health=asked))
    probes.probe()
    probes.probe(remap_pending=True)
    assert probes.last is not None
    conditions = probes.health.conditions
    assert (3 in out_of_service(conditions, asked, NODE.indices())) is out
    assert (3 in to_requeue(conditions, asked, NODE.indices())) is requeued
    assert (probes.last.drain == "GPU 3: memory is replaced at the next reset") is drained
    probes.probe(remap_pending=True)
    assert probes.last.drain == ""  # drained once: who resumes it means it


def test_memory_errors_that_only_warn_leave_the_gpu_in() -> None:
    node = msgspec.structs.replace(NODE, health={"ecc": HealthAction.WARN})
    reading = NodeReading(node="n0", time=NOW, source="nvml", gpus=(gpu(0, ecc_errors=1),), containers=())
    assert gpu_states(NODE, reading, {})[0].state is GpuState.UNUSABLE
    assert gpu_states(node, reading, {})[0].state is GpuState.FREE


def test_a_day_of_noise_makes_no_condition() -> None:
    """17,280 probes of 8 GPUs: temperatures waver, values vanish, and now and then one is odd."""
    rng, probes = random.Random(7), Probes()
    odd: Counter[str] = Counter()
    errors, before = [0] * 8, [False] * 8
    for _ in range(int(86400 / TICK)):
        probes.now += TICK
        gpus = []
        for i in range(8):
            errors[i] += rng.random() < 0.001
            changes: dict[str, Any] = {"nvlink_errors": errors[i], "pcie_replays": errors[i]}
            heat = min(87.0, rng.gauss(74, 4))
            changes |= {"temperature_c": int(heat), "thermal_margin_c": 92 - int(heat) if heat >= 70 else None}
            changes |= {"clocks": rng.choice((0, 1, 4)), "utilization_pct": rng.uniform(0, 100)}
            for name in ("pcie_width", "nvlinks", "clocks", "recovery"):
                if rng.random() < 0.01:
                    changes[name] = None
            before[i] = not before[i] and rng.random() < 0.01
            if before[i]:  # odd for one reading: as values taken while a GPU changes its state are
                kind, glitch = rng.choice([entry for entry in LEVELS if entry[0] in
                                           ("off-bus", "nvlink-down", "pcie-width", "pcie-speed", "clocks-thermal",
                                            "clocks-power", "temperature")])  # fmt: skip
                odd[kind] += 1
                if "lost" in glitch:
                    gpus.append(Gpu(index=i, uuid=f"u{i}", error="NVML did not answer in 4 s"))
                    continue
                changes |= glitch
            gpus.append(gpu(i, probes.now, **changes))
        log = KernelLog(source="kernel", now_us=probes.us())
        reading = NodeReading(
            node="n0", time=probes.now, boot_id="b1", source="nvml", gpus=tuple(gpus), containers=(), kernel=log
        )
        probes.last = observe_health(probes.health, NODE, reading, {}, probes.now, dict)
        probes.health = probes.last.health
        assert probes.last.events == []
    assert min(odd.values()) > 50
    assert len(odd) == 7


# -- the text of messages


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE",
         {"number": 31, "bus": "0000:3b:00", "pid": 4711, "process": "python"}),
        ("NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
         {"number": 79, "bus": "0000:65:00"}),
        ("NVRM: Xid (PCI:0009:01:00 GPU-I:05): 94, pid=1, name=a b, Contained", {"number": 94, "bus": "0009:01:00",
         "pid": 1, "process": "a b"}),
        ("NVRM: Xid (0000:03:00): 48, An uncorrectable double bit error", {"number": 48, "bus": "0000:03:00"}),
        ("NVRM: GPU 0000:3B:00.0: GPU has fallen off the bus.", {"number": 79, "bus": "0000:3b:00"}),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
         {"number": 20034, "bus": "0000:c1:00", "switch": True, "fatal": True}),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore",
         {"number": 28006, "bus": "0000:c1:00", "switch": True}),
    ],
)  # fmt: skip
def test_messages_of_drivers_old_and_new(text: str, expected: dict[str, Any]) -> None:
    (found,) = parse_messages([(12, text)])
    assert found == XidMessage(at_us=12, **expected)


@pytest.mark.parametrize(
    "text",
    ["NVRM: loading NVIDIA UNIX x86_64 Kernel Module", "usb: NVRM: Xid (PCI:0000:3b:00): 79, x", "NVRM: Xid (): 79",
     "NVRM: Xid (PCI:0000:3b:00): none"],
)  # fmt: skip
def test_other_messages_are_none(text: str) -> None:
    assert parse_messages([(1, text)]) == ()


def test_kinds_are_in_order() -> None:
    assert len({k.name for k in KINDS}) == len(KINDS)
    assert all(k.title and k.advice for k in KINDS)
    assert {xid.kind for xid in XIDS.values()} < {k.name for k in KINDS}
    program = next(k for k in KINDS if k.name == "xid-program")
    assert (program.action, program.max_action) == (HealthAction.WARN, HealthAction.WARN)
    stored = NodeHealth(conditions=(Condition(kind="ecc", since=1.0, last_seen=2.0, detail="d"),))
    assert msgspec.json.decode(msgspec.json.encode(stored), type=NodeHealth) == stored
