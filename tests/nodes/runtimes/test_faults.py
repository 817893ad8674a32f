"""Engines' errors about names that a job chose itself: these must not take a node out of service."""

from __future__ import annotations

from typing import Any

from gpusched.controller.launchfaults import Fault, fault_of
from gpusched.model.jobs import Mount
from tests.builders import spec
from tests.nodes.runtimes.world import World

CASES: dict[str, dict[str, Any]] = {
    "no folder for the output": {"output": "/nowhere/1.out"},
    "an output that is a folder": {"output": "/root"},
    "no folder for stderr": {"error": "/nowhere/1.err"},
    "a workdir that is a file": {"workdir": "/etc/passwd"},
    "no source of a mount": {"mounts": (Mount("/nowhere/set", "/mnt/set"),)},
    "a file over a folder": {"mounts": (Mount("/etc/hostname", "/bin"),)},
    "below what cannot be written": {"mounts": (Mount("/var/tmp", "/mnt/a", True), Mount("/etc", "/mnt/a/b"))},
    "below a file": {"mounts": (Mount("/var/tmp", "/etc/passwd/x"),)},
    "over proc": {"mounts": (Mount("/var/tmp", "/proc"),)},
    "over everything": {"mounts": (Mount("/var/tmp", "/"),)},
    "one place twice": {"mounts": (Mount("/var/tmp", "/mnt/a"), Mount("/etc", "/mnt/a"))},
    "an image of no such name": {"image": "UPPER:1"},
    "an image that is nowhere": {"image": "nosuch.invalid/x:1"},
    "too little memory": {"memory_mib": 1},
    "more cores than there are": {"cores": 4096},
}


def test_names_chosen_by_a_job_are_no_evidence_against_its_node(engine: World) -> None:
    refs = {
        name: engine.launch("true", job=f"job{number}", **case) for number, (name, case) in enumerate(CASES.items())
    }
    found = {name: engine.await_phase(ref, "failed", "exited", timeout_s=120) for name, ref in refs.items()}
    faults = {}
    for name, case in CASES.items():
        named = {key: value for key, value in case.items() if key in ("output", "error", "workdir", "mounts", "image")}
        if found[name]["phase"] == "failed":  # engines differ in what they take
            faults[name] = fault_of(str(found[name]["error"]), spec(**named))
    assert Fault.NODE not in faults.values(), [(name, found[name]["error"]) for name in CASES]
    assert len(faults) >= len(CASES) - 2


def test_nor_without_an_engine(process: World) -> None:
    cases = [case for case in CASES.values() if case.keys() & {"output", "error", "workdir"}]
    for number, case in enumerate(cases):
        ref = process.launch("true", job=f"job{number}", **case)
        assert fault_of(str(process.await_phase(ref, "failed")["error"]), spec(**case)) == Fault.OWN
