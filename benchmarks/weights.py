"""Make the weights that come with gpusched again, and compare them with the files.

`make weights`, or `.venv/bin/python -m benchmarks.weights [--only rltune] [--short] [--data FOLDER] [--out FOLDER]`

Each file has a command, which is all that makes it: seed, hyper-parameters and data are in it. A file is *equal* if all
its bytes are (on one type of CPU: sums of floating-point numbers may differ on another), *equal weights* if only its
metadata differs, such as the version of gpusched that made it. Times are on training cards, which are not compared.

``--short`` makes a tiny version of each file twice and compares the two: in seconds, without data.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
DATA = ROOT / "../shared/data"  # traces and measured tables, unless --data says another folder
WEIGHTS = "default.safetensors"
PHILLY = "traces/philly_2017.csv.gz"
PHILLY_SHA256 = "9f7fbf0c439d888638cd7bf7f254d9ff6afdb73945da8ff15a734378f18a7776"
OPENB = "traces/openb_pod_list_default.csv.gz"
OPENB_SHA256 = "dc395ddbd156933a57da9caee1d79ddd745146deb1255bcb1f4aac54bc3047f3"
PAIRS = "profiles/contention/deepshare_pairs.csv"
PAIRS_SHA256 = "f87e7ae33993b0c3520a4c389962f3aebbfcbc8acf3d7a057d8ebac7dff7ddeb"
FOREIGN = "made on another type of CPU"
SHORT_LOG = "gpusched trace generate benchmarks/weights_workload.yaml -o {out}/log.csv"
_PUBLIC = f"gpusched reproduce rltune --policy {{policy}} --trace {{data}}/{PHILLY} --out {{out}}/{WEIGHTS}"
_SHORT = f"gpusched reproduce rltune --policy {{policy}} --quick --trace {{out}}/log.csv --out {{out}}/{WEIGHTS}"


class ShippedWeights(NamedTuple):
    """A file of weights in the repository.

    Attributes:
        file: Its path in the repository.
        command: What makes it; ``{out}``: an empty folder, for `WEIGHTS`; ``{data}``: the folder of the traces.
        short: Commands of a tiny version.
        data: Traces and tables -> SHA-256 of those that the file is of.
        differs: Why the file may differ from what is made here; "": it must not.
    """

    file: str
    command: str
    short: tuple[str, ...]
    data: dict[str, str]
    differs: str = ""


def _rltune(policy: str) -> ShippedWeights:
    return ShippedWeights(
        f"gpusched/data/policies/{policy}/{WEIGHTS}", _PUBLIC.format(policy=policy, data="{data}", out="{out}"),
        (SHORT_LOG, _SHORT.format(policy=policy, out="{out}")), {PHILLY: PHILLY_SHA256},
    )  # fmt: skip


def _paper(
    agent: str, options: str = "", data: dict[str, str] | None = None, differs: str = ""
) -> ShippedWeights:  # fmt: skip
    """Return the row of an agent of ``reproduce``; the short version draws its workloads instead of having ``data``."""
    command, out = f"gpusched reproduce {agent}", f"--out {{out}}/{WEIGHTS}"
    file = f"gpusched/data/{agent}.safetensors"
    return ShippedWeights(file, f"{command}{options} {out}", (f"{command} --quick {out}",), data or {}, differs)


SHIPPED = (
    _rltune("rltune"),
    _rltune("rltune-preempt"),
    _paper("dl2"),
    _paper("topology", f" --policy agents --table {{data}}/{PAIRS}", {PAIRS: PAIRS_SHA256}),
    _paper("maifs", " --workloads {data}/traces", {PHILLY: PHILLY_SHA256, OPENB: OPENB_SHA256}, FOREIGN),
)


def run(commands: Sequence[str], out: Path, data: Path) -> Path:
    """Run a file's commands; return the weights made."""
    out.mkdir(parents=True)
    for command in commands:
        words = [word.format(out=out, data=data) for word in command.split()]
        subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return out / WEIGHTS


def comparison(made: Path, shipped: Path) -> str:
    """Return how a made file compares with another: equal, equal weights, or what differs."""
    if made.read_bytes() == shipped.read_bytes():
        return "equal"
    (new, new_about), (old, old_about) = map(_content, (made, shipped))
    if differing := sorted(k for k in new.keys() | old.keys() if not _same(new.get(k), old.get(k))):
        return f"differs: {', '.join(differing)}"
    keys = sorted(k for k in new_about.keys() | old_about.keys() if new_about.get(k) != old_about.get(k))
    return f"equal weights, other metadata: {', '.join(keys)}"


def _content(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata() or {})


def _same(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    if first is None or second is None:
        return False
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def short(row: ShippedWeights, folder: Path) -> str:
    """Make the tiny version of a file twice, and compare the two."""
    if not row.short:
        return "no short version"
    first, second = (run(row.short, folder / name, folder) for name in ("first", "second"))
    return comparison(first, second)


def whole(row: ShippedWeights, folder: Path, data: Path) -> str:
    """Make a file and compare it with that in the repository."""
    for name, digest in row.data.items():
        found = hashlib.sha256((data / name).read_bytes()).hexdigest() if (data / name).is_file() else "missing"
        if found != digest:
            return f"left out: {data / name} is {found if found == 'missing' else 'another file'}"
    return comparison(run([row.command], folder / Path(row.file).parent, data), ROOT / row.file)


def main(words: Sequence[str] | None = None) -> int:
    """Make the files; return 1 if one is not made, or differs from the repository's without a reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="tiny versions, twice each")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="files with this in their path")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the traces")
    parser.add_argument("--out", type=Path, help="keep what is made in this folder")
    options = parser.parse_args(words)
    folder, failed = options.out or Path(tempfile.mkdtemp()), False
    for row in SHIPPED:
        if options.only and not any(word in row.file for word in options.only):
            continue
        begun = time.monotonic()
        try:
            found = short(row, folder / row.file) if options.short else whole(row, folder, options.data)
        except subprocess.CalledProcessError as error:
            found = f"not made: exit code {error.returncode}"
        failed |= found.startswith(("differs", "not made")) and (options.short or not row.differs)
        known = f" ({row.differs})" if row.differs and not options.short else ""
        print(f"{row.file}: {found}{known}, {time.monotonic() - begun:.0f} s", flush=True)
    if options.out is None:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
