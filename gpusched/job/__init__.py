"""For programs that run as jobs: report progress, and stop in time. This file has no dependencies and may be copied.

In: GPUSCHED_JOB_DIR. Out: progress.json and saved.json there. May import: the standard library. Begin with
`__init__.progress`. Outside of gpusched, and in all processes but one (of rank 0), nothing is written.
"""

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType

_asked = False
_first: tuple[float, float | None] | None = None  # when this process first reported, and seconds since the one before


class Again:
    """The result of a callable's ``checkpoint`` method: the call to make when its job restarts.

    The method is called, with the arguments of the call, when the job is signalled to end (TERM, USR1 or USR2: before
    its limit, for another job's sake). Then the job is queued again. None in its place means the same call once more.
    """

    def __init__(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs


def progress(step: int, of: int | None = None, samples_per_s: float | None = None) -> None:
    """Report that ``step`` steps are done, of ``of`` in all."""
    _write("progress", {"step": step, "of": of, "samples_per_s": samples_per_s} | _group())


def saved(step: int, gpus: int | None = None) -> None:
    """Report that work up to this step is saved: call it once the checkpoint is on disk under its final name."""
    _write("saved", {"step": step, "gpus": gpus})


def stop_when_asked(*signals: signal.Signals) -> None:
    """Handle the signals that end the job (TERM, or these): from now on they only set `asked_to_stop`."""
    for one in signals or (signal.SIGTERM,):
        signal.signal(one, _note)


def asked_to_stop() -> bool:
    """Return whether to save and exit now. Processes may learn it at different times: all-reduce it at each step."""
    return _asked


def resize() -> dict[str, float] | None:
    """Return ``from`` and ``to`` (GPUs) and ``deadline`` (Unix seconds) of a resize; None: not being resized."""
    try:
        with open(os.path.join(os.environ["GPUSCHED_JOB_DIR"], "resize.json")) as file:
            found: dict[str, float] = json.load(file)
            return found
    except (KeyError, OSError):
        return None


def _group() -> dict[str, float | None]:
    """Return the nodes of a hot job's group, since when it reports, and for how long none did before it."""
    global _first
    nodes, now = os.environ.get("GROUP_WORLD_SIZE"), time.time()
    if nodes is None or os.environ.get("GPUSCHED_RESIZE") != "hot":
        return {}
    if _first is None:
        try:
            last = os.stat(os.path.join(os.environ["GPUSCHED_JOB_DIR"], "progress.json")).st_mtime
            _first = (now, max(0.0, now - last))
        except (KeyError, OSError):
            _first = (now, None)
    return {"nodes": float(nodes), "ran_s": max(0.0, now - _first[0]), "paused_s": _first[1]}


def _note(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = True


def _writes() -> bool:
    """Return whether this is the one process that writes.

    In a job that is resized hot, RANK may be 0 on any node; the node that never leaves is the one with NODE_RANK 0.
    """
    of = ("NODE_RANK", "LOCAL_RANK") if os.environ.get("GPUSCHED_RESIZE") == "hot" else ("RANK",)
    return all(os.environ.get(name, "0") == "0" for name in of)


def _write(name: str, facts: dict[str, int | float | None]) -> None:
    folder = os.environ.get("GPUSCHED_JOB_DIR")
    if folder and _writes():
        path = os.path.join(folder, f"{name}.json")
        part = f"{path}.{os.getpid()}-{threading.get_ident()}.part"
        try:
            with open(part, "w") as file:
                json.dump(facts, file)
            os.replace(part, path)  # a reader sees all of it
        except OSError as error:  # a full disk, say: not to be able to report ends no training
            warnings.warn(f"{name}.json cannot be written: {error.strerror}", RuntimeWarning, stacklevel=3)
