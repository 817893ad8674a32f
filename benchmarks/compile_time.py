"""Measure compilation on first use: everything that live decisions and plain replays run, in an empty cache folder.

python -m benchmarks.compile_time
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable


def main() -> None:
    """One part after the other, in the order in which a user may meet them; a later one finds what it shares."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": folder, "NUMBA_CACHE_DIR": folder, "GPUSCHED_COMPILED": "always"}
        began, used = time.perf_counter(), time.process_time()
        for name, part in parts().items():
            before, cpu = time.perf_counter(), time.process_time()
            part()
            print(f"{name:<28}{time.perf_counter() - before:6.1f} s {time.process_time() - cpu:6.1f} CPU s", flush=True)
        wall, cpu = time.perf_counter() - began, time.process_time() - used
        print(f"{'all, imports included':<28}{wall:6.1f} s {cpu:6.1f} CPU s")


def parts() -> dict[str, Callable[[], object]]:
    """Name -> what compiles it."""
    from gpusched.sched.warming import warm_up
    from gpusched.sim.pool import Pool
    from gpusched.sim.replay import one_job, replay
    from gpusched.study.bounds import bounds_of

    job, pool = one_job(), Pool.uniform(1, 1)
    policies = {
        "fifo": "replay: strict",
        "fifo+easy": "replay: skip, EASY",
        "wfp3": "replay: changing orders",
        "srtf": "replay: preemptive",
    }
    found: dict[str, Callable[[], object]] = {"live decisions": warm_up}
    found |= {what: (lambda name=name: replay(job, pool, name)) for name, what in policies.items()}
    found["policies in Python"] = lambda: replay(job, pool, lambda s: [s.start(j) for j in s.waiting()])
    found["bounds"] = lambda: bounds_of(job, pool, limits=True)
    return found


if __name__ == "__main__":
    main()
