"""``python -m tests.slurm.mortal controller``: a controller that is killed again and again, when it is asked for.

One process loads what a controller needs and forks controllers, one after another. Each dies by SIGKILL at its step of
a cycle (`STEPS`), the last one lives on. What each decided, and was about to ask of Slurm, is written down before: a
test compares it with what came of it.

Files in the folder that MORTAL_FOLDER names:
    asked: written here, a line for each start that was decided or asked for, and withdrawal: time, job, nodes.
    deaths: written here, the step of each.
    steps: those at which the next controllers die, one each; without it they live on.
    now: the present one dies as soon as this is there.
    race: a script that is run once, with the nodes of the first start, right before starts are asked for.
MORTAL_LEASE_S, MORTAL_LIMIT_S: shorter limits, so that a test need not wait a minute for the end of the lease, or ten
seconds for a frozen slurmctld.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusched.__main__ import main
from gpusched.controller.service import warm_up
from gpusched.controller.slurm.applying import LeaseApplier
from gpusched.controller.slurm.cycle import SlurmCycle
from gpusched.controller.slurm.reading import SlurmReader
from gpusched.model.ids import slurm_id
from gpusched.model.plan import Start
from gpusched.queue.store import Store
from gpusched.slurm import lease
from gpusched.slurm.commands import Slurm

BATCH = tuple(f"asked {n}" for n in range(5))
STEPS = ("began", "read", "mirrored", "decided", "renewed", *BATCH, "asking", "sent", "noting", "noted")
"""Of one cycle. ``asked 2``: scontrol was given two starts of a batch. asking: it is at work and goes on without us."""

FOLDER = Path(os.environ.get("MORTAL_FOLDER", "/nonexistent"))
START = re.compile(r"update JobId=(\S+) ReservationName=gpusched ReqNodeList=(\S+)")
BACK = re.compile(r"update JobId=(\S+) ReservationName= ReqNodeList=")
NOW = FOLDER / "now"

_step = ""
_is_sending = False


def reach(step: str) -> None:
    """Die here, if that is asked for."""
    if step == _step or NOW.exists():
        die(step)


def die(step: str) -> None:
    """By SIGKILL."""
    NOW.unlink(missing_ok=True)
    write("deaths", step)
    os.kill(os.getpid(), signal.SIGKILL)


def write(name: str, *lines: str) -> None:
    """At once, so that lines of two processes do not mix."""
    with open(FOLDER / name, "ab", buffering=0) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def update(self: Slurm, lines: Sequence[str], given: Any = Slurm.update) -> dict[int, str]:
    """`Slurm.update`, written down, and cut short."""
    if not any(START.fullmatch(line) for line in lines):
        _note(lines)
        done: dict[int, str] = given(self, lines)
        if any("ReservationName=gpusched" in line for line in lines):
            reach("renewed")
        return done
    if _step.startswith("asked") and len(lines) >= (wanted := int(_step.split()[1])):
        _note(lines[:wanted])
        given(self, lines[:wanted])
        reach(_step)
    _note(lines)
    if (race := FOLDER / "race").exists():
        subprocess.run(["sh", race, next(found[2] for line in lines if (found := START.fullmatch(line)))], check=True)
        race.unlink()
    if _step == "asking":
        threading.Thread(target=given, args=(self, lines), daemon=True).start()
        time.sleep(0.004)  # scontrol has begun, and has its lines; it does not die with us
        reach(_step)
    done = given(self, lines)
    reach("sent")
    return done


def _note(lines: Sequence[str]) -> None:
    now = time.time()
    starts = [f"{now} start {found[1]} {found[2]}" for line in lines if (found := START.fullmatch(line))]
    write("asked", *starts, *(f"{now} back {found[1]} -" for line in lines if (found := BACK.match(line))))


def read(self: SlurmReader, *args: Any, given: Any = SlurmReader.read) -> Any:
    """`SlurmReader.read`."""
    reach("began")
    found = given(self, *args)
    reach("read")
    return found


def record(self: SlurmCycle, *args: Any, given: Any = SlurmCycle._record) -> None:
    """`SlurmCycle._record`."""
    given(self, *args)
    reach("mirrored")


def decide(self: SlurmCycle, *args: Any, given: Any = SlurmCycle._decide) -> Any:
    """`SlurmCycle._decide`, written down."""
    found = given(self, *args)
    now = time.time()
    starts = [action for action in (found.plan.actions if found else ()) if isinstance(action, Start)]
    write("asked", *(f"{now} plan {slurm_id(a.job_id)} {','.join(p.node for p in a.allocation.parts)}" for a in starts))
    reach("decided")
    return found


def send(self: LeaseApplier, asks: Any, *args: Any, given: Any = LeaseApplier._send) -> None:
    """`LeaseApplier._send`."""
    global _is_sending
    _is_sending = any(ask.purpose == "start" for ask in asks)
    given(self, asks, *args)
    if _is_sending:
        reach("noted")
    _is_sending = False


def append(self: Store, *args: Any, given: Any = Store.append) -> None:
    """`Store.append`, the last of the transaction in which starts are noted."""
    given(self, *args)
    if _is_sending:
        reach("noting")


def serve() -> None:
    """Fork controllers until one ends by itself, or this process is asked to end."""
    global _step
    child = 0
    ended = False

    def forward(number: int, frame: object) -> None:
        nonlocal ended
        ended = True
        os.kill(child, number)

    while True:
        steps = FOLDER / "steps"
        todo = steps.read_text().split("\n") if steps.exists() else []
        _step, rest = (todo[0], todo[1:]) if todo else ("", [])
        steps.write_text("\n".join(rest)) if rest else steps.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
            main()
            return
        signal.signal(signal.SIGTERM, forward)
        _, status = os.waitpid(child, 0)
        if ended or not os.WIFSIGNALED(status):
            os._exit(os.waitstatus_to_exitcode(status) & 127)


if __name__ == "__main__":
    Slurm.update = update  # type: ignore[method-assign]
    SlurmReader.read = read  # type: ignore[method-assign]
    SlurmCycle._record = record  # type: ignore[method-assign]
    SlurmCycle._decide = decide  # type: ignore[method-assign]
    LeaseApplier._send = send  # type: ignore[method-assign]
    Store.append = append  # type: ignore[method-assign]
    lease.LEASE_S = int(os.environ.get("MORTAL_LEASE_S", lease.LEASE_S))
    _, *others = Slurm.__init__.__defaults__  # type: ignore[misc]
    Slurm.__init__.__defaults__ = (float(os.environ.get("MORTAL_LIMIT_S", 10)), *others)  # type: ignore[misc]
    warm_up()
    sys.argv[0] = "gpusched"
    serve()
