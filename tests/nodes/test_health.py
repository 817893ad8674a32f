"""Faults of GPUs on a real node: by NVML's ABI and the kernel's messages, through the probe, into conditions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.controller.health import observe_health
from gpusched.model.health import NodeHealth
from gpusched.model.resources import MigSettings
from gpusched.nodes.parse_reading import parse_messages, with_events
from gpusched.nodes.payload import events, kernel
from gpusched.nodes.probe import probe
from tests.nodes.nodes import declare, opened, settings_for
from tests.testbed import Testbed, TestNode
from tests.testbed.hardware import pci_address
from tests.testbed.waiting import wait_until

LOG = "/root/kernel.log"
BY_NVML: list[tuple[dict[str, object], str]] = [
    ({"error": 15}, "off-bus"),
    ({"field.230": 1}, "needs-reset"),
    ({"ecc.1.0": 2}, "ecc"),
    ({"remapped": "0,1,1,0"}, "remap-pending"),
    ({"field.31": 1}, "remap-pending"),
    ({"remapped": "0,9,0,1"}, "remap-failed"),
    ({"field.30": 61}, "pages-retired"),
    ({"nvlink5": 0}, "nvlink-down"),
    ({"field.59": 1}, "nvlink-errors"),
    ({"field.38": 900}, "nvlink-errors"),
    ({"field.94": 20}, "pcie-replays"),
    ({"pcie_width": 8}, "pcie-width"),
    ({"pcie_gen": 1, "util_gpu": 96}, "pcie-speed"),
    ({"clocks_event_reasons": 0x60}, "clocks-thermal"),
    ({"clocks_event_reasons": 0x88}, "clocks-power"),
    ({"temp_c": 90}, "temperature"),
]
BY_KERNEL = [
    (13, "xid-program"), (31, "xid-program"), (43, "xid-program"), (45, "xid-program"), (48, "xid-gpu"),
    (62, "xid-gpu"), (74, "xid-gpu"), (79, "off-bus"), (94, "xid-gpu"), (95, "xid-gpu"), (119, "xid-gpu"),
    (64, "remap-failed"), (92, "xid-other"),
]  # fmt: skip


class Watched:
    """A node that is probed as the controller does it."""

    def __init__(self, testbed: Testbed, node: TestNode) -> None:
        self.test_node, self.settings = node, settings_for(testbed)
        self.node = declare(testbed, node, kernel_log=LOG)
        self.health, self.now = NodeHealth(), time.time()
        self.lines: list[str] = ["[    1.000000] Linux version 6"]
        self._write()

    def _write(self) -> None:
        (self.test_node.disk / "home" / "kernel.log").write_text("\n".join(self.lines) + "\n")

    def say(self, message: str) -> None:
        """Add a message of the kernel, of now."""
        us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.lines.append(f"<4>[{us // 10**6:5d}.{us % 10**6:06d}] {message}")
        self._write()

    def probe(self, times: int, transport: Any, listen: bool | None = None) -> set[tuple[int | None, str]]:
        """Probe so often; return what there is: (GPU, kind)."""
        for _ in range(times):
            self.now += 5
            reading = probe(transport, self.node, "c1", self.settings, lambda: self.now, listen=listen)
            self.health = observe_health(self.health, self.node, reading, {}, self.now, dict).health
        return {(c.index, c.kind) for c in self.health.conditions}


def test_every_injected_fault_is_its_condition_within_two_probes(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    for begin in range(0, len(BY_NVML), 8):
        node.nvml_reset()
        watched, faults = Watched(testbed, node), BY_NVML[begin : begin + 8]
        with opened(watched.node, watched.settings) as transport:
            assert watched.probe(2, transport) == set()
            for gpu, (values, _) in enumerate(faults):
                node.nvml_set({f"gpu{gpu}.{key}": value for key, value in values.items()})
            found = watched.probe(2, transport)
            assert found == {(gpu, kind) for gpu, (_, kind) in enumerate(faults)}
    node.nvml_reset()
    for begin in range(0, len(BY_KERNEL), 8):
        watched, messages = Watched(testbed, node), BY_KERNEL[begin : begin + 8]
        with opened(watched.node, watched.settings) as transport:
            assert watched.probe(1, transport) == set()
            for gpu, (number, _) in enumerate(messages):
                bus = pci_address(gpu)[4:-2]
                watched.say(f"NVRM: Xid (PCI:{bus}): {number}, pid=4711, name=python, Ch 00000008")
            found = watched.probe(1, transport)
            assert found == {(gpu, kind) for gpu, (_, kind) in enumerate(messages)}


def test_a_machine_s_and_a_switch_s_errors_are_the_node_s(testbed: Testbed) -> None:
    watched = Watched(testbed, testbed.nodes[0])
    with opened(watched.node, watched.settings) as transport:
        watched.probe(1, transport)
        watched.say("NVRM: Xid (PCI:0000:07:00): 32, pid=1, name=x, Channel ID 00000001")
        watched.say("nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
        assert watched.probe(1, transport) == {(None, "xid-machine"), (None, "nvswitch")}
        assert watched.health.log_source == LOG


def test_a_node_whose_log_cannot_be_read_is_read_all_the_same(testbed: Testbed) -> None:
    watched = Watched(testbed, testbed.nodes[1])
    watched.node = msgspec.structs.replace(watched.node, kernel_log="/root/no-such-file")
    with opened(watched.node, watched.settings) as transport:
        reading = probe(transport, watched.node, "c1", watched.settings, time.time)
    assert (reading.source, reading.kernel and reading.kernel.source) == ("nvml", "")
    assert reading.gpus[0].health is not None
    assert reading.gpus[0].health.remap_pending is False  # a V100 has pages, no rows
    assert reading.gpus[0].health.remap_failed is None


# -- events of NVML


class Listened(Watched):
    """A node whose listener's files and process are looked at."""

    @property
    def lock(self) -> Path:
        """The listener's lock."""
        return self.test_node.disk / "home" / ".local" / "state" / "gpusched-node" / "c1" / self.node.name / events.LOCK

    def listeners(self) -> list[int]:
        """The machine's ids of the node's listeners."""
        names = {pid: Path(f"/proc/{pid}/comm") for pid in self.test_node.pids()}
        return [pid for pid, name in names.items() if name.exists() and name.read_text().strip() == "gpusched-xids"]

    def wait_ready(self) -> int:
        """Wait until one listens; return its id."""
        wait_until(lambda: self.lock.exists() and self.lock.read_text().strip(), what="a listener")
        (pid,) = self.listeners()
        return pid

    def age(self, seconds: float) -> None:
        """Have the last probe be so long ago."""
        os.utime(self.lock, (time.time() - seconds,) * 2)


def test_an_event_of_nvml_without_a_message_is_a_condition(testbed: Testbed) -> None:
    watched = Listened(testbed, testbed.nodes[0])
    with opened(watched.node, watched.settings) as transport:
        assert watched.probe(1, transport, listen=True) == set()
        first = watched.wait_ready()
        watched.test_node.nvml_set({"gpu3.xid": "1:31", "gpu5.xid": "1:62"})
        wait_until(lambda: (watched.lock.with_name(events.EVENTS)).exists(), what="the event")
        watched.age(events.TOUCH_S + 1)  # so that each of these looks whether there is a listener
        assert watched.probe(2, transport, listen=True) == {(3, "xid-program"), (5, "xid-gpu")}
        assert watched.listeners() == [first]
        assert time.time() - watched.lock.stat().st_mtime < events.TOUCH_S  # and says that it is wanted

        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not watched.listeners(), what="its end")
        watched.probe(1, transport, listen=True)
        assert watched.listeners() == []  # not again at once: it might end each time
        watched.age(events.TOUCH_S + 1)
        watched.probe(2, transport, listen=True)
        assert watched.wait_ready() != first
        watched.test_node.nvml_set({"gpu6.xid": "2:13"})
        wait_until(lambda: b":37:" in watched.lock.with_name(events.EVENTS).read_bytes(), what="the event")
        assert (6, "xid-program") in watched.probe(1, transport, listen=None)
        watched.probe(1, transport, listen=False)  # the node is drained
        wait_until(lambda: not watched.listeners(), what="its end")
        assert not watched.lock.exists()


def test_where_there_is_no_log_events_are_the_source(testbed: Testbed) -> None:
    watched = Listened(testbed, testbed.nodes[1])
    watched.node = msgspec.structs.replace(watched.node, kernel_log="/root/no-such-file")
    with opened(watched.node, watched.settings) as transport:
        watched.probe(1, transport, listen=True)
        watched.wait_ready()
        watched.test_node.nvml_set({"gpu0.xid": "1:48"})
        wait_until(lambda: (watched.lock.with_name(events.EVENTS)).exists(), what="the event")
        assert watched.probe(1, transport, listen=True) == {(0, "xid-gpu")}
        assert watched.health.log_source == "nvml"
        watched.age(events.UNWANTED_S + 1)
        wait_until(lambda: not watched.lock.exists(), what="its end, as no probe comes")


def test_no_listener_has_gpus_open_that_are_cut_on_demand(testbed: Testbed) -> None:
    watched = Listened(testbed, testbed.nodes[0])
    watched.node = msgspec.structs.replace(watched.node, mig=MigSettings(gpus=(7,)))
    with opened(watched.node, watched.settings) as transport:
        watched.probe(2, transport, listen=True)
        assert not watched.lock.exists()


def test_events_of_a_listener_count_in_its_boot_only(tmp_path: Path) -> None:
    file, lines = tmp_path / events.EVENTS, [b"[   20.000001] NVRM: Xid (PCI:0000:07:00): 31"]
    assert events.heard(str(tmp_path)) == b""
    events.write(str(tmp_path), lines)
    assert kernel.messages(events.heard(str(tmp_path)), 20_000_000) == [[20_000_001, lines[0][15:].decode()]]
    file.write_bytes(b"another-boot\n" + lines[0])
    assert events.heard(str(tmp_path)) == b""
    file.write_bytes(events.boot_id().encode() + b"\n\0\xff noise NVRM: Xid\n[x] NVRM: Xid (PCI:0000:07:00): 31\n")
    assert kernel.messages(events.heard(str(tmp_path)), -1) == []
    file.unlink()
    file.symlink_to("/dev/zero")
    assert events.heard(str(tmp_path)) == b""


def test_an_event_that_the_log_has_too_is_one_message() -> None:
    log = parse_messages([(20_000_000, "NVRM: Xid (PCI:0000:07:00): 31, pid=4711, name=python, Ch 8")])
    near = [(21_500_000, "NVRM: Xid (PCI:0000:07:00): 31")]
    others = [(20_000_001, "NVRM: Xid (PCI:0000:07:00): 13"), (20_000_002, "NVRM: Xid (PCI:0000:0f:00): 31")]
    later = [(26_000_000, "NVRM: Xid (PCI:0000:07:00): 31")]
    found = with_events(log, parse_messages([*near, *others, *later]))
    assert [(m.at_us, m.pid) for m in found] == [
        (20_000_000, 4711), (20_000_001, None), (20_000_002, None), (26_000_000, None)
    ]  # fmt: skip


# -- the text of the log


def test_only_the_kernel_s_own_new_lines_count() -> None:
    text = (
        b"<4>[   10.000001] NVRM: Xid (PCI:0000:07:00): 31, old\n"
        b"<4>[   20.000001][ T123] NVRM: Xid (PCI:0000:07:00): 13, new\n"
        b"<12>[  21.000001] NVRM: Xid (PCI:0000:07:00): 79, written by a program\n"
        b"<4>[   22.000001] python: NVRM: Xid (PCI:0000:07:00): 79, in another's words\n"
        b"[   23.000001] dgx1 kernel: nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 1, of journalctl\n"
        b"Nov 26 10:00:00 dgx1 kernel: [   24.000001] NVRM: of rsyslog\n"
        b"garbled \xff NVRM\n"
    )
    found = kernel.messages(text, 10_000_001)
    assert [at for at, _ in found] == [20_000_001, 23_000_001, 24_000_001]
    assert [text[:7] for _, text in found] == ["NVRM: X", "nvidia-", "NVRM: o"]


def test_a_flood_is_cut_to_the_newest_lines_and_long_ones_are_cut() -> None:
    text = b"\n".join(b"<4>[%5d.000000] NVRM: %s" % (i, b"x" * 5000) for i in range(1, 300))
    found = kernel.messages(text, -1)
    assert (len(found), found[-1][0]) == (kernel.MAX_MESSAGES, 299_000_000)
    assert max(len(line) for _, line in found) == kernel.MAX_CHARS


def test_the_end_of_a_file_is_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"[{i:5d}.000000] NVRM: number {i}\n" for i in range(20_000)))
    own: dict[str, object] = {"cluster_id": "c1", "node": "n1", "want_kernel": True}
    for after, count in ((19_990, 19), (15_000, 100), (None, 100)):  # ten seconds more, for events that come later
        request = {**own, "kernel_log": str(log), "kernel_after_us": None if after is None else after * 10**6}
        found = kernel.read(request)
        assert (found["source"], len(found["messages"])) == (str(log), count)
        assert found["messages"][-1][0] == 19_999 * 10**6
    assert kernel.read({**own, "kernel_log": str(tmp_path / "none")})["source"] == ""
    os.mkfifo(tmp_path / "pipe")
    assert kernel.read({**own, "kernel_log": str(tmp_path / "pipe")})["source"] == ""  # and waits for nobody


@pytest.mark.parametrize("before", ["", "Nov 26 10:00:00 dgx1 kernel: "])
def test_of_a_file_with_several_boots_only_the_last_counts(before: str, tmp_path: Path) -> None:
    """Otherwise a reboot would end no Xid, and hide new ones until the machine has its former uptime."""
    boots = [("[    0.000000] Linux", "[    0.000000] BIOS", f"[{up}.000001] NVRM: Xid {up}") for up in (99999, 12345)]
    (tmp_path / "log").write_text("".join(f"{before}{line}\n" for boot in boots for line in boot))
    found = kernel.read({"want_kernel": True, "kernel_log": str(tmp_path / "log"), "cluster_id": "c", "node": "n"})
    assert found["messages"] == [[12_345_000_001, "NVRM: Xid 12345"]]


def test_the_payload_runs_alone_and_reads_this_machine_s_log() -> None:
    code = "import json, sys; sys.path.insert(0, '.'); from gpusched.nodes.payload import kernel; "
    code += "print(json.dumps(kernel.read({'cluster_id': 'c1', 'node': 'n1', 'want_kernel': True})))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["source"] in ("kernel", "journal", "")
    assert found["now_us"] > 0


@pytest.mark.parametrize("missing", ["counters", "width"])
def test_a_value_that_a_board_does_not_support_affects_no_other(missing: str, testbed: Testbed) -> None:
    node = testbed.nodes[0]
    conf = node.disk / "nvml" / "nvml.conf"
    keys = ("gpu*.field.", "gpu*.remapped", "gpu*.nvlinks") if missing == "counters" else ("gpu*.pcie_width",)
    conf.write_text("".join(line for line in conf.read_text().splitlines(True) if not line.startswith(keys)))
    watched = Watched(testbed, node)
    with opened(watched.node, watched.settings) as transport:
        reading = probe(transport, watched.node, "c1", watched.settings, time.time)
        health = reading.gpus[0].health
        assert health is not None
        assert (health.pcie_width, health.retired_pages) == ((16, None) if missing == "counters" else (None, 0))
        assert (reading.gpus[0].power_w, health.clocks) == (55.0, 1)
        assert watched.probe(3, transport) == set()
