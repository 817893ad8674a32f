"""``make mutate``: puts small bugs in, one at a time, and lists those that no fast test notices.

The mutants are cosmic-ray's; a seeded sample of them, or all. The tree itself is never touched: everything happens on
copies in a temporary folder, compiled passes run as plain Python (``NUMBA_DISABLE_JIT=1``).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BUILD = ROOT / "build" / "mutate"
Survey = dict[str, Any]


@dataclass(frozen=True, order=True)
class Mutant:
    path: str
    line: int
    column: int
    operator: str
    occurrence: int
    arguments: str

    def text(self) -> str | None:
        """None: it cannot be made (cosmic-ray takes no dotted name out of several exceptions)."""
        operator = get_operator(self.operator)(**json.loads(self.arguments))
        try:
            return mutate_code(source(self.path), operator, self.occurrence)
        except AttributeError:
            return None

    def change(self) -> tuple[str, str]:
        """The first line that differs, before and after."""
        after = (self.text() or "").splitlines()
        pairs = zip(source(self.path).splitlines(), after, strict=False)
        return next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))

    def __str__(self) -> str:
        before, after = self.change()
        return f"{self.path}:{self.line}: {self.operator.partition('/')[2]}\n    - {before}\n    + {after}"


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def tree(path: str) -> ast.Module:
    return ast.parse(source(path))


# -- which mutants ---------------------------------------------------------------------------------------------------


def mutants(config: dict[str, Any], paths: list[str]) -> list[Mutant]:
    """All that are tried, in order of place."""
    with tempfile.TemporaryDirectory() as folder, use_db(str(Path(folder, "work.sqlite")), WorkDB.Mode.create) as db:
        init([ROOT / path for path in paths], db, {})
        specs = [item.mutations[0] for item in db.work_items]
    found = []
    for spec in specs:
        path = str(Path(spec.module_path).relative_to(ROOT))
        mutant = Mutant(path, *spec.start_pos, spec.operator_name, spec.occurrence, json.dumps(spec.operator_args))
        text = source(path).splitlines()[mutant.line - 1]
        skipped = any(
            re.search(s["operator"], mutant.operator) and re.search(s.get("line", ""), text) for s in config["skip"]
        )
        wanted = re.search(config["only"].get(path, ""), spec.definition_name or "")
        if wanted and not skipped and not in_annotation(mutant):
            found.append(mutant)
    return sorted(found)


@cache
def annotations(path: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types stand: they are not looked at when the program runs."""
    nodes: list[ast.expr | None] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            nodes.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            nodes.append(node.returns)
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in nodes if n is not None]


def in_annotation(mutant: Mutant) -> bool:
    place = (mutant.line, mutant.column)
    return any(begin <= place < end for begin, end in annotations(mutant.path))


# -- which tests -----------------------------------------------------------------------------------------------------


def lines_of(mutant: Mutant) -> range:
    """The lines of the statement that the mutant is in; of one with a body those before the body."""
    best = range(mutant.line, mutant.line + 1)
    for node in ast.walk(tree(mutant.path)):
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            first = body[0].pattern.lineno if body and isinstance(body[0], ast.match_case) else body and body[0].lineno
            last = max(node.lineno, first - 1) if first else node.end_lineno
            if mutant.line <= (last or 0):
                best = range(node.lineno, (last or 0) + 1)  # the innermost comes last
    return best


def runs_when_loaded(mutant: Mutant) -> bool:
    functions = (node for node in ast.walk(tree(mutant.path)) if isinstance(node, ast.FunctionDef | ast.Lambda))
    bodies = (node.body if isinstance(node.body, list) else [node.body] for node in functions)
    return not any(body[0].lineno <= mutant.line <= (body[-1].end_lineno or 0) for body in bodies)


def tests_for(mutant: Mutant, survey: Survey, config: dict[str, Any]) -> list[str]:
    """Ids of the tests that reach it, the quickest first, for at most the budget of CPU seconds."""
    seconds: dict[str, float] = survey["cpu_s"]
    known = survey["lines"].get(mutant.path, {})
    contexts = {test for line in lines_of(mutant) for test in known.get(str(line), ())}
    reached = contexts - {""}
    if reached != contexts or runs_when_loaded(mutant):  # which may be in the first test that needs the module
        reached |= {test for tests in known.values() for test in tests} - {""}
    chosen, spent = [], 0.0
    for test in sorted(reached & seconds.keys(), key=lambda test: (seconds[test], test)):
        spent += seconds[test]
        if seconds[test] > config["longest_cpu_s"] or spent > config["budget_cpu_s"]:
            break
        chosen.append(test)
    return chosen


class Worker:
    """A process on a copy of its own."""

    def __init__(self, folder: Path, number: int) -> None:
        self.copy = folder / f"copy{number}"
        listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.copy / name)
        env = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(self.copy), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")], cwd=self.copy, env=env, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, **job: Any) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:  # stopped
            sys.exit()
        answer: int | None = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def survey_of(workers: list[Worker], config: dict[str, Any], folder: Path) -> Survey:
    """Which tests reach which lines; of a file of tests kept until it changes, or anything that is no test."""
    files = sorted({str(f.relative_to(ROOT)) for t in config["tests"] for f in _test_files(ROOT / t)})
    common = hashlib.sha256(str(sys.version_info).encode())
    for file in sorted([*ROOT.glob("gpusched/**/*.py"), *ROOT.glob("tests/**/*.py")]):
        if not file.name.startswith("test_") and file.parent != HERE:
            common.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    kept = {file: BUILD / f"survey-{_digest(common.digest(), file)}.json" for file in files}
    if new := [file for file in files if not kept[file].is_file()]:
        print(f"which lines do the tests of {len(new)} files reach? (once per change)", flush=True)
        at_once = workers[: len(new)]  # without a file pytest would run all tests there are
        answers = [folder / f"survey{i}.json" for i in range(len(at_once))]
        todo = [
            lambda w=w, i=i: w.ask(survey=str(answers[i]), files=new[i :: len(at_once)], timeout_s=3600)
            for i, w in enumerate(at_once)
        ]
        _at_once(todo)
        BUILD.mkdir(parents=True, exist_ok=True)
        for i, answer in enumerate(answers):
            part = json.loads(answer.read_text())
            for file in new[i :: len(at_once)]:
                kept[file].write_text(json.dumps(_of_file(part, file)))
    found: Survey = {"cpu_s": {}, "wall_s": {}, "lines": {}}
    for file in files:
        part = json.loads(kept[file].read_text())
        found["cpu_s"] |= part["cpu_s"]
        found["wall_s"] |= part["wall_s"]
        for path, lines in part["lines"].items():
            for line, tests in lines.items():
                found["lines"].setdefault(path, {}).setdefault(line, []).extend(tests)
    return found


def _digest(common: bytes, file: str) -> str:
    return hashlib.sha256(common + file.encode() + b"\0" + (ROOT / file).read_bytes()).hexdigest()[:16]


def _of_file(survey: Survey, file: str) -> Survey:
    """Return the functions that the tests of one file reach, and those run as modules load ("")."""
    own = {key: {t: s for t, s in survey[key].items() if t.startswith(f"{file}::")} for key in ("cpu_s", "wall_s")}
    lines = {
        path: {line: [t for t in tests if not t or t in own["cpu_s"]] for line, tests in of.items()}
        for path, of in survey["lines"].items()
    }
    return {**own, "lines": lines}


def _test_files(path: Path) -> Iterable[Path]:
    return [path] if path.is_file() else path.glob("test_*.py")


def _at_once(todo: list[Any]) -> None:
    threads = [threading.Thread(target=one) for one in todo]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- trying them -----------------------------------------------------------------------------------------------------


def verdict(worker: Worker, mutant: Mutant, survey: Survey, config: dict[str, Any]) -> str:
    """killed, survived, or unreached."""
    text, ids = mutant.text(), tests_for(mutant, survey, config)
    if text is None or not ids:
        return "unreached"
    files = sorted({test.partition("::")[0] for test in ids})
    limit = 60 + 10 * sum(survey["wall_s"][test] for test in ids)
    status = worker.ask(path=mutant.path, text=text, files=files, ids=ids, timeout_s=limit)
    return "survived" if status in (0, 5) else "killed"  # 5: pytest found none of them


def interval(killed: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (JASA 22, 1927)."""
    if not of:
        return 0.0, 1.0
    z, p = 1.96, killed / of
    middle, half = p + z * z / (2 * of), z * (p * (1 - p) / of + z * z / (4 * of * of)) ** 0.5
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def harmless(mutant: Mutant, allowed: list[dict[str, str]]) -> str:
    """Why a survivor is named as harmless; "" where it is not."""
    before, after = mutant.change()
    for one in allowed:
        if mutant.path.endswith(one["path"]) and before == one["from"] and re.search(one["to"], after):
            return one["why"]
    return ""


def report(tried: dict[Mutant, str], total: int, seed: int, allowed: list[dict[str, str]]) -> str:
    """Survivors, then the figures."""
    alive = sorted(m for m, found in tried.items() if found != "killed")
    named = {m: why for m in alive if (why := harmless(m, allowed))}
    lines = [f"{m}\n    {tried[m]}" for m in alive if m not in named]
    lines += [f"{m}\n    harmless: {why}" for m, why in named.items()]
    counted = len(tried) - len(named)
    killed = len(tried) - len(alive)
    low, high = interval(killed, counted)
    lines.append(
        f"{len(tried)} of {total} mutants tried (seed {seed}): {killed} killed, {len(alive) - len(named)} not, "
        f"{len(named)} harmless\nkilled of those that matter: {killed / max(counted, 1):.1%} "
        f"(95 % interval {low:.1%} to {high:.1%}); of all tried: {killed / max(len(tried), 1):.1%}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("--sample", type=int, help="how many mutants; all where not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("paths", nargs="*", help="files of those in tests/mutate/config.toml; all where not given")
    args = parser.parse_args()
    config = tomllib.loads((HERE / "config.toml").read_text())
    paths = sorted(str(p.relative_to(ROOT)) for pattern in config["paths"] for p in ROOT.glob(pattern))
    wanted = [str(Path(p).resolve().relative_to(ROOT)) for p in args.paths]
    paths = [p for p in paths if not wanted or any(p == w or p.startswith(f"{w}/") for w in wanted)]
    everything = mutants(config, paths)
    sample = random.Random(args.seed).sample(everything, min(args.sample or len(everything), len(everything)))
    print(f"{len(everything)} mutants in {len(paths)} files; trying {len(sample)} of them", flush=True)
    tried: dict[Mutant, str] = {}
    for ending in (signal.SIGINT, signal.SIGTERM):  # the results so far are printed, and the copies removed
        signal.signal(ending, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        workers = [Worker(Path(folder), number) for number in range(args.jobs)]
        try:
            survey = survey_of(workers, config, Path(folder))
            _try_all(workers, sample, survey, config, tried)
        except KeyboardInterrupt:
            print("\nstopped; of those tried so far:")
        finally:
            for worker in workers:
                worker.close()
        said = report(tried, len(everything), args.seed, config.get("harmless", []))
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / "report.txt").write_text(said + "\n")
        print(said)
    return 0


def _try_all(
    workers: list[Worker], sample: list[Mutant], survey: Survey, config: dict[str, Any], tried: dict[Mutant, str]
) -> None:
    todo: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in sample:
        todo.put(mutant)

    def work(worker: Worker) -> None:
        while True:
            try:
                mutant = todo.get_nowait()
            except queue.Empty:
                return
            if mutant.text() is None:
                continue
            tried[mutant] = verdict(worker, mutant, survey, config)
            print("." if tried[mutant] == "killed" else f"\n{mutant} ({tried[mutant]})\n", end="", flush=True)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        threads[0].join(0.2)
        threads[-1].join(0.2)
    print()


if __name__ == "__main__":
    sys.exit(main())
