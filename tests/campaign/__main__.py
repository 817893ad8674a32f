"""``python -m tests.campaign --seed N --faults K --jobs J --kinds controller,node.freeze``; see --help."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.campaign import invariants, report, tormented
from tests.campaign.faults import matching
from tests.campaign.run import Campaign
from tests.campaign.schedule import Schedule, draw
from tests.campaign.shim import preload
from tests.campaign.site import Site
from tests.campaign.slurmsite import BesideSlurm
from tests.testbed import Testbed
from tests.testbed.slurm import SlurmSite

SCHEDULER = {"SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 where something was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--kinds", default="*", help="patterns with commas: controller.*,node.freeze (default: all)")
    parser.add_argument("--engine", choices=["native", "slurm"], default="native")
    parser.add_argument("--shared", action="store_true", help="every other job is another user's")
    parser.add_argument("--flood", type=int, default=1800, help="how many files inbox.many writes at most")
    parser.add_argument("--root", type=Path, help="folder to keep (default: one that is removed)")
    parser.add_argument("--schedule", action="store_true", help="print the schedule as JSON and end")
    parser.add_argument("--verbose", action="store_true", help="print each step")
    options = parser.parse_args(arguments)
    try:
        schedule = draw(options.seed, options.jobs, options.faults, matching(options.kinds, options.engine))
    except ValueError as error:
        parser.error(str(error))
    if options.schedule:
        print(json.dumps({"work": schedule.work, "acts": schedule.acts}))
        return 0
    if options.root is not None:
        options.root.mkdir(parents=True)
        return run(schedule, options, options.root)
    with tempfile.TemporaryDirectory(prefix="gs-campaign-") as folder:
        return run(schedule, options, Path(folder))


def run(schedule: Schedule, options: argparse.Namespace, folder: Path) -> int:
    """Run a schedule in a folder, and print what came of it."""
    began = time.monotonic()
    preload()
    tormented.STATE_KIB = max(tormented.STATE_KIB, 5 * options.flood)  # a page for each of inbox.many's files
    with Testbed(folder / "testbed", count=4) as testbed, ExitStack() as ends:
        if options.engine == "slurm":
            slurm = SlurmSite(testbed, settings=SCHEDULER)
            ends.callback(slurm.down)
            slurm.up()
            folder.chmod(0o755)
            site: Site | BesideSlurm = BesideSlurm(slurm, folder)
        else:
            on_fuse = any(act.kind.startswith("fuse.") for act in schedule.acts)
            site = Site(testbed, folder, shared=options.shared, on_fuse=on_fuse)
        ends.callback(site.close)
        site.flood = options.flood
        campaign = Campaign(site, schedule, print if options.verbose else lambda _: None)
        violations = []
        try:
            campaign.run()
        except (TimeoutError, AssertionError) as error:
            violations.append("\n".join(["did not come to rest:", str(error), *getattr(error, "__notes__", ())]))
        finally:
            (folder / "log").write_text(site.controller_log)
        violations += invariants.broken(campaign)
        print(report.table(campaign, violations, options.seed, time.monotonic() - began))
        if violations:
            print(f"again: python -m tests.campaign --engine {options.engine} --seed {options.seed} "
                  f"--faults {options.faults} --jobs {options.jobs} --kinds '{options.kinds}'"
                  f"{' --shared' * options.shared}")  # fmt: skip
        site.kill()
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
