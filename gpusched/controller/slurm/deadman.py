"""A dead man's switch that releases jobs in the lease when the controller has died: a process that outlives it.

Slurm ends the lease by itself. But jobs that were asked to start and did not keep the nodes that we chose, and Slurm
never restores the priority of a job that it held because its nodes were reserved. So a shell beside the controller
waits for the end of a pipe, which the kernel closes when the controller dies. Then this module runs, waits for the
lease's end, and reverts both, unless a controller runs again by then.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import gpusched
from gpusched.controller.slurm.ownership import LEASED_UNTIL
from gpusched.model.jobs import JobRecord
from gpusched.model.slurm import LEASE, SlurmJob, SlurmMode, is_held_in_reservation
from gpusched.queue.store import Reader
from gpusched.slurm import lease
from gpusched.slurm.commands import NoAnswer, Slurm

_POLL_S = 1.0
_PATIENCE_S = 900.0  # give up if Slurm does not respond for so long
_WAIT = 'cat > /dev/null; exec "$@"'
_log = logging.getLogger(__name__)


class DeadMan:
    """Keeps the waiting shell running beside a controller that decides.

    Args:
        state: The state folder.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, modes: Mapping[str, SlurmMode]) -> None:
        """Start the shell, unless it runs or no partition is in mode decide."""
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
            _log.error("starts will not be undone if this controller dies: %s", error)


def undo(state: Path, slurm: Slurm, wait: Callable[[float], None] = time.sleep) -> int:
    """Wait for the lease's end, then release pending jobs that were placed in it; return the number of commands.

    0 too if a controller runs again, or another one holds the lease: it handles the jobs itself.
    """
    last_beat: str | None = None
    for _ in range(int(_PATIENCE_S / _POLL_S)):
        reader = Reader.open(state)
        if reader is None:
            return 0
        with closing(reader):
            beat = reader.meta("heartbeat") or ""  # by the controller's clock, which may be a second ahead of ours
            if last_beat not in (None, beat):
                return 0
            last_beat = beat
            own_until = float(reader.meta(LEASED_UNTIL) or 0.0)
        try:
            current = next((r for r in slurm.reservations() if r.name == LEASE), None)
            if current is None or current.end_time <= time.time():
                return _release_jobs(state, slurm)
            if current.end_time > own_until + 1:
                return 0
        except NoAnswer:
            pass
        wait(_POLL_S)
    return 0


def _release_jobs(state: Path, slurm: Slurm) -> int:
    reader = Reader.open(state)
    if reader is None:
        return 0
    with closing(reader):
        stored = {job.id: job for job in (*reader.pending(), *reader.active())}
    lines = [line for job in slurm.jobs() for line in _commands(job, stored.get(job.id))]
    slurm.update(lines)
    return len(lines)


def _commands(job: SlurmJob, stored: JobRecord | None) -> Iterator[str]:
    facts = stored.slurm if stored is not None else None
    if facts is None or job.state != "PENDING" or not (facts.leased or facts.pinned):
        return
    if is_held_in_reservation(job):
        yield from lease.undo(job, facts.nodelist)
    elif job.reservation == LEASE or set(job.req_nodes) == set(facts.pinned):
        yield lease.withdraw(job.id, facts.nodelist)


if __name__ == "__main__":
    undo(Path(sys.argv[1]), Slurm())
