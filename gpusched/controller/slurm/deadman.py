"""What lets go of jobs in the lease when the controller has died: a process that outlives it.

Slurm ends the lease by itself. But on jobs that were asked to start and had not begun it leaves the nodes that we
chose, and where it took such a job's priority, as its nodes had been reserved meanwhile, it never gives that back. So
beside the controller a shell waits for the end of a pipe that the kernel closes with it, however it dies; then this
module runs, waits for the lease's end, and undoes both, unless a controller runs again by then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import gpusched
from gpusched.controller.slurm.tenancy import LEASED_UNTIL
from gpusched.model.jobs import JobRecord
from gpusched.model.slurm import LEASE, SlurmJob, SlurmMode, is_held_in_reservation
from gpusched.queue.store import Reader
from gpusched.slurm import lease
from gpusched.slurm.commands import NoAnswer, Slurm

_POLL_S = 1.0
_PATIENCE_S = 900.0  # so long Slurm may be silent before it is given up
_WAIT = 'cat > /dev/null; exec "$@"'


class DeadMan:
    """Keeps the waiting shell beside a controller that decides.

    Args:
        state: The state folder.
        say: For the controller's log.
    """

    def __init__(self, state: Path, say: Callable[[str], None]) -> None:
        self._state, self._say = state, say
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, modes: Mapping[str, SlurmMode]) -> None:
        """Start it where it does not run and some partition is decided for."""
        if SlurmMode.DECIDE not in modes.values() or (self._process is not None and self._process.poll() is None):
            return
        paths = [str(Path(gpusched.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        module = [sys.executable, "-P", "-m", __name__, str(self._state.absolute())]
        argv = ["sh", "-c", _WAIT, "gpusched-deadman", *module]
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
                start_new_session=True, cwd="/",
            )  # fmt: skip
        except OSError as error:
            self._say(f"nothing will undo starts if this controller dies: {error}")


def undo(state: Path, slurm: Slurm, wait: Callable[[float], None] = time.sleep) -> int:
    """Wait for the lease's end, then let go of jobs that were put into it and wait; how much there was to ask for that.

    0 too where a controller runs again, or another one has the lease: it sees to them itself.
    """
    died = time.time()
    for _ in range(int(_PATIENCE_S / _POLL_S)):
        reader = Reader.open(state)
        if reader is None:
            return 0
        with closing(reader):
            if float(reader.meta("heartbeat") or 0.0) > died:
                return 0
            own = float(reader.meta(LEASED_UNTIL) or 0.0)
        try:
            known = next((one for one in slurm.reservations() if one.name == LEASE), None)
            if known is None or known.end_time <= time.time():
                return _let_go(state, slurm)
            if known.end_time > own + 1:
                return 0
        except NoAnswer:
            pass
        wait(_POLL_S)
    return 0


def _let_go(state: Path, slurm: Slurm) -> int:
    reader = Reader.open(state)
    if reader is None:
        return 0
    with closing(reader):
        stored = {job.id: job for job in (*reader.pending(), *reader.active())}
    lines = [line for job in slurm.jobs() for line in _lines(job, stored.get(job.id))]
    slurm.update(lines)
    return len(lines)


def _lines(job: SlurmJob, stored: JobRecord | None) -> Iterator[str]:
    facts = stored.slurm if stored is not None else None
    if facts is None or job.state != "PENDING" or not (facts.leased or facts.pinned):
        return
    if is_held_in_reservation(job):
        yield from lease.undo(job, facts.nodelist)
    elif job.reservation == LEASE or set(job.req_nodes) == set(facts.pinned):
        yield lease.withdraw(job.id, facts.nodelist)


if __name__ == "__main__":
    undo(Path(sys.argv[1]), Slurm())
