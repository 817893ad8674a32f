"""`python -m tests.testbed up COUNT --root DIR`, and `down`: a testbed for benchmarks and for use by hand."""

import argparse
import json
import sys
from pathlib import Path

from tests.testbed.cluster import Testbed, sweep
from tests.testbed.slurm import SlurmSite


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the result of `up` is JSON on standard output."""
    parser = argparse.ArgumentParser(prog="python -m tests.testbed", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start nodes that stay until `down`; print their addresses and keys as JSON")
    up.add_argument("count", type=int, nargs="?", default=4)
    up.add_argument("--root", type=Path, required=True, help="folder for keys, logs and disks")
    up.add_argument("--index", type=int, help="which testbed, 0 to 15 (default: the first free one)")
    up.add_argument("--gpus", type=int, default=8, help="GPUs per node")
    up.add_argument("--docker", action="store_true", help="start dockerd on every node too")
    up.add_argument("--slurm", action="store_true", help="start Slurm too; SLURM_CONF is slurm_conf of the JSON")
    down = commands.add_parser("down", help="end a testbed; its files stay")
    down.add_argument("--root", type=Path, help="the folder given to `up`")
    down.add_argument("--index", type=int, help="instead of --root")
    options = parser.parse_args(arguments)
    try:
        if options.command == "up":
            return _up(options)
        return _down(options, down)
    except RuntimeError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1


def _up(options: argparse.Namespace) -> int:
    testbed = Testbed(options.root, options.index, options.count, options.gpus)
    testbed.up()
    if options.docker:
        for node in testbed.nodes:
            node.start_docker()
    site = SlurmSite(testbed) if options.slurm else None
    if site is not None:
        site.up()
        site.detach()
    text = json.dumps({**testbed.describe(), **(site.describe() if site is not None else {})}, indent=1)
    (testbed.root / "testbed.json").write_text(text)
    testbed.detach()
    print(text)
    return 0


def _down(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    index = options.index
    if index is None:
        if options.root is None:
            parser.error("--root or --index is needed")
        path = options.root / "testbed.json"
        if not path.exists():
            return 0
        index = json.loads(path.read_text())["index"]
        path.unlink()
    sweep(index)
    return 0


if __name__ == "__main__":
    sys.exit(main())
