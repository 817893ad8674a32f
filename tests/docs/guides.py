"""Commands of the guides, each as it is run: the lines of a page, and the little folder of files that they speak of."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path

from tests.commands import run
from tests.docs.generate import DOCS
from tests.e2e.conftest import Cluster
from tests.e2e.people import Screen
from tests.promotion import weights
from tests.traces import samples

GUIDES = [DOCS.parent / "README.md", DOCS / "getting-started.md", *sorted((DOCS / "guides").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"(?:.*\| )?(?:[A-Z_]+=\S+ )?gpusched [a-z]")


def commands(page: Path) -> Iterator[str]:
    """Yield each command line of a page that calls gpusched, whole: with its pipe, continued lines joined."""
    text = page.read_text("utf-8")
    blocks = _BLOCK.sub(lambda m: _prompted(m[2]) if m[1] in ("", "console", "bash", "sh") else "", text)
    lines = iter(blocks.splitlines())
    for line in lines:
        if not line.startswith("    ") or not _CALL.match(line.strip()):
            continue
        command = line.strip()
        while _goes_on(command):
            command += "\n" + next(lines)
        yield command


def examples(page: Path) -> Iterator[str]:
    """The commands of a page, without synopses (``[OPTIONS]``) and comments."""
    for line in commands(page):
        if "[OPTIONS]" not in line:
            yield _soon(re.sub(r"\s+#.*$", "", line))


def _prompted(block: str) -> str:
    """Return the commands of a console block, indented as commands outside blocks are."""
    return "\n".join(f"    {line[2:]}" for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ "))


def _goes_on(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a quote is open
        return True
    return False


def shown(page: str, beginning: str) -> str:
    """Return the block of a guide that begins so."""
    return next(
        m[2] for m in _BLOCK.finditer((DOCS / "guides" / page).read_text("utf-8")) if m[2].startswith(beginning)
    )


CTRL_C = "\x03"
AT_A_TERMINAL = {
    "gpusched controller": ("controller.service: controller ", CTRL_C),
    "gpusched nodes --watch": ("dgx1", CTRL_C),
    "gpusched web(?! --export)": ("http://", CTRL_C),
    "gpusched metrics --listen": ("/metrics", CTRL_C),
    "gpusched logs -f": ("line", CTRL_C),
    "gpusched (run|exec) .*(--pty|-it)": ("#", "exit\n"),
}
"""Interactive commands: what they show, and what is typed then."""
FIRST = ("gpusched init ", "gpusched check", "gpusched controller")
"""Commands before there is a cluster."""


def follow(cluster: Cluster, line: str, folder: Path, code: int = 0) -> str:
    """Run one line as the guide has it, in the reader's folder; who sets up begins in an empty one.

    By bash, if there is anything in it that only a shell understands.

    Returns:
        Its stdout; "" where it went on until Ctrl-C.

    Raises:
        AssertionError: It failed, or did not end; with what it said.
    """
    env = cluster.env()
    if line.startswith(FIRST):
        folder = folder / "first"
        if " init " in line:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        env |= {"GPUSCHED_STATE": str(folder / "state"), "GPUSCHED_INVENTORY": str(folder / "inventory.yaml")}
    argv = ["bash", "-o", "pipefail", "-c", line]
    for beginning, (said, answer) in AT_A_TERMINAL.items():
        if re.match(beginning, line):
            _at_a_terminal(cluster, ["env", "-C", str(folder), *argv], env, said, answer)
            return ""
    if not re.search(r"[|&;<>$`*?~#\n\\]", line) and line.startswith("gpusched "):
        done = run(*shlex.split(line)[1:], env=env, cwd=folder, timeout=900)
        return _checked(done, code)
    done = subprocess.run(
        argv, env=env, cwd=folder, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=300,
        check=False,
    )  # fmt: skip
    return _checked(done, code)


def _checked(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def _at_a_terminal(cluster: Cluster, argv: list[str], env: dict[str, str], said: str, answer: str) -> None:
    """Run a command in a terminal until it has said so, answer, and see it end without a traceback."""
    screen = Screen(cluster, ["env", *(f"{k}={v}" for k, v in env.items()), *argv], 30, 120)
    try:
        screen.wait_for(said)
        screen.type(answer)
        code = screen.process.wait(300)
        assert "Traceback" not in screen.look()
        assert code in ((0, 130) if answer == CTRL_C else (0,)), (code, screen.shown)
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{screen.shown}") from error
    finally:
        screen.close()


def _soon(line: str) -> str:
    """Put dates of maintenance and reservations as far ahead as they were when the guides were written."""
    since = datetime.now().date() - date(2026, 11, 20)
    return re.sub(r"\b202[6-9]-\d\d-\d\d(?=T)", lambda day: str(date.fromisoformat(day[0]) + since), line)


# ---- the files that the guides speak of, small


MEASURED = samples.SHARED.parent / "profiles"


def write_files(folder: Path) -> None:
    """Write what a reader of the guides has beside him: traces, job scripts, the files that guides show.

    Measured speeds are those of ../shared/data, where it is.
    """
    (folder / "policies").mkdir()
    (folder / "policies/mixed.yaml").write_text(shown("heterogeneous.md", "description: EASY"))
    (folder / "small.yaml").write_text(shown("replay.md", "about:"))
    (folder / "policies/gist.yaml").write_text(weights.YAML + weights.QUICK)
    if MEASURED.exists():
        shutil.copytree(MEASURED / "placement", folder / "profiles")
        for name in ("restart_seconds.csv", "gavel_throughputs.json.gz"):
            shutil.copy(MEASURED / name, folder)
        (folder / "gavel_throughputs.json").write_bytes(
            gzip.decompress((MEASURED / "gavel_throughputs.json.gz").read_bytes())
        )
    texts = {
        "philly.csv": _philly(), "jobs.swf": _swf(), "big.swf": _swf(), "jobs.txt": _sacct(), "trace.csv": _philly(),
        "jobs.trace": samples.GAVEL_7, "cluster_job_log": _philly_log(), "token.txt": "t0k3n\n",
        "questions.txt": "why\n", "train.sh": "#!/bin/sh\n#SBATCH --gpus=1 --time=10\n", "sweep.sh": "#!/bin/sh\n",
        "evaluate.py": "print(input())\n", "train.py": "pass\n", "pull.py": "pass\n", "exercise.py": "pass\n",
        "fabric.txt": "SwitchName=leaf1 Nodes=dgx[1-2]\nSwitchName=leaf2 Nodes=dgx[3-4]\n"
        "SwitchName=spine Switches=leaf[1-2]\n",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "philly_2017.csv.gz").write_bytes(gzip.compress(_philly().encode()))


def _philly() -> str:
    rows = [
        f"{datetime(2017, 9, 20) + timedelta(hours=4 * i)},{600 + 300 * (i % 7)},{1 + i % 4},{vc}"
        for i in range(240)
        for vc in ("11cb48", "6c71a0")
    ]
    return "\n".join(["submit_time,duration_s,num_gpus,vc", *rows, ""])


def _philly_log() -> str:
    first = datetime(2017, 9, 20)
    jobs = [
        {
            "status": "Pass", "vc": "11cb48", "jobid": f"application_{i}", "user": f"u{i % 3}",
            "submitted_time": str(first + timedelta(hours=6 * i)),
            "attempts": [{
                "start_time": str(first + timedelta(hours=6 * i, minutes=1)),
                "end_time": str(first + timedelta(hours=6 * i + 1 + i % 3)),
                "detail": [{"ip": "m1", "gpus": [f"gpu{g}" for g in range(1 + i % 4)]}],
            }],
        }
        for i in range(160)
    ]  # fmt: skip
    return json.dumps(jobs)


def _swf() -> str:
    rows = [f"{i} {300 * i} 0 {300 + 60 * (i % 9)} {1 + i % 4} -1 -1 {1 + i % 4} 1800 -1 1 {1 + i % 3} 1 1 1 1 -1 -1"
            for i in range(1, 120)]  # fmt: skip
    return "\n".join(["; MaxProcs: 16", *rows, ""])


def _sacct() -> str:
    rows = [
        f"{i}|{i}|ann|A100|{t}|{t}|{t + 60}|{t + 1800}|60|{tres}|{tres}|COMPLETED|1|4|00:00:00|dgx1"
        for i in range(1, 60)
        for t in [1_764_000_000 + 600 * i]
        for tres in [f"billing=4,cpu=4,gres/gpu={1 + i % 4},mem=16G,node=1"]
    ]
    return "\n".join([samples.SACCT.splitlines()[0], *rows, ""])
