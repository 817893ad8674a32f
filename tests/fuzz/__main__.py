"""``make fuzz``: fuzzed inputs at all doors or one; exits with 1 where there was a defect."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.running import run
from tests.fuzz.targets import TARGETS, opened


def main() -> int:
    """Run, and print each target's outcomes and defects as they are known."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", default="all", choices=("all", *TARGETS))
    parser.add_argument("--inputs", type=int, default=1_000_000, help="all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first input, to repeat one; then no extremes"
    )
    options = parser.parse_args()
    shm = Path("/dev/shm")  # small files, one after the other: no disk need see them
    found = 0
    for name in TARGETS if options.target == "all" else [options.target]:
        share = options.inputs * TARGETS[name][1] // 100 if options.target == "all" else options.inputs
        with (
            tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder,
            opened(name, Path(folder)) as target,
        ):
            extremes = [] if options.first else target.extremes
            report = run(name, target.make, target.ask, extremes, share, options.seed, options.first)
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in report.outcomes.most_common())
        print(f"{name}: {report.inputs:,} inputs in {report.seconds:.0f} CPU s: {outcomes}", flush=True)
        for defect in report.defects:
            found += 1
            short = repr(defect.data[:500])
            print(f"  {name} --seed {options.seed} --first {defect.number}: {defect.what}\n    {short}", flush=True)
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
