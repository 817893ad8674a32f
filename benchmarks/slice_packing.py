"""Measure what the queue's order costs where GPUs are cut on demand: the planner's cuts against exact packings.

`.venv/bin/python -m benchmarks.slice_packing [--queues 2000]`: percent of the GPUs' parts that requests get, over drawn
queues of up to ten requests on one to three empty A100s. An exact packing knows all requests and tries every
arrangement; of the first N jobs in the queue none may be passed over for a
later one (0: any order).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from gpusched.model.slicetables import GPU_PARTS, parts_of
from gpusched.sched.slices.plan import arrange
from tests.sched.slices import pending
from tests.sched.test_slice_plans import A100, Lab, draws, fits, on_demand, packed

Arrangement = tuple[tuple[str, ...], ...]
"""The profiles on each GPU, sorted."""


def best(gpus: int, wanted: Sequence[str], in_order: int) -> int:
    """Return the most parts that requests can get if each of the first ``in_order`` is served wherever it can be."""
    served: dict[Arrangement, int] = {((),) * gpus: 0}
    for place, name in enumerate(wanted):
        more = {}
        for arrangement, parts in served.items():
            for gpu, held in enumerate(arrangement):
                profiles = tuple(sorted((*held, name)))
                if fits(A100, profiles):
                    others = (one for at, one in enumerate(arrangement) if at != gpu)
                    more[tuple(sorted((*others, profiles)))] = parts + parts_of(name)
        if place >= in_order:
            served |= more
        elif more:
            served = more
    return max(served.values())


def planned(gpus: int, wanted: Sequence[str]) -> int:
    """Return the parts that requests get by the planner's cuts."""
    jobs = [pending(f"j{i:02}", 1, name, submit=float(i)) for i, name in enumerate(wanted)]
    cuts = arrange(Lab([on_demand("n", gpus=gpus)], jobs).snapshot()).cuts
    there = [name for cut in cuts for name, _ in cut.slices]
    return sum(min(there.count(name), wanted.count(name)) * parts_of(name) for name in set(wanted))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=2000)
    queues = list(draws(parser.parse_args().queues))
    rows = [("planner", planned), ("exact, in the queue's order", lambda gpus, wanted: packed(A100, gpus, wanted))]
    for n in (5, 3, 2, 1, 0):
        rows.append((f"exact, the first {n} in order", partial(best, in_order=n)))
    for name, pack in rows:
        share = sum(pack(gpus, wanted) / (GPU_PARTS * gpus) for gpus, wanted in queues) / len(queues)
        print(f"{name:<30}{100 * share:6.1f} %")


if __name__ == "__main__":
    main()
