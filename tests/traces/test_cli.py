"""``gpusched trace`` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusched.cli import main as cli
from gpusched.traces.load import load
from tests.traces import samples

Put = Callable[[str, str], Path]
Type = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Type:
    def typed(*argv: object) -> tuple[int, str, str]:
        code = cli.run(["trace", *map(str, argv)])
        return code, *capsys.readouterr()

    return typed


def as_json(outcome: tuple[int, str, str]) -> Any:
    assert outcome[0] == 0, outcome
    assert outcome[2] == ""
    return json.loads(outcome[1])


def test_import(put: Put, run: Type, tmp_path: Path) -> None:
    source, out = put("p.csv", samples.PHILLY_CSV + "2017-09-08 02:16:41,-1,1,a\n"), tmp_path / "t.npz"
    code, text, errors = run("import", source, "-o", out)
    assert (code, text) == (0, f"wrote {out}: 3 jobs, 1 row rejected\n")
    assert errors == f"gpusched: {source}: line 5: duration_s: found -1, expected a run time of more than 0 s\n"
    assert load(out).ids == ("1", "2", "3")
    found = as_json(run("import", source, "-o", out, "--json"))
    assert found["rejected_rows"] == [{"line": 5, "why": "duration_s: found -1, expected a run time of more than 0 s"}]
    code, text, errors = run("import", source, "-o", out, "--strict")
    assert (code, text) == (2, "")
    assert errors.startswith(f"gpusched: error: {source}:5: duration_s: found -1")


def test_stats_slice_scale(put: Put, run: Type, tmp_path: Path) -> None:
    source, out = put("cluster_log.csv", samples.HELIOS), tmp_path / "t.npz"
    assert as_json(run("stats", source, "--json"))["jobs"] == 3
    assert "jobs" in run("stats", source)[1]
    assert as_json(run("slice", source, "--vc", "vchbv", "-o", out, "--json"))["jobs"] == 1
    assert as_json(run("scale", source, "--load", 0.5, "--json"))["how"] == "nodes"
    scaled = as_json(run("scale", source, "--load", 0.5, "--nodes", 2, "-o", out, "--json"))
    assert (scaled["how"], scaled["load"]) == ("arrivals", pytest.approx(0.5))
    code, _, errors = run("scale", source, "--load", 0.5, "--nodes", 2)
    assert (code, errors.count("\n")) == (2, 1)
    assert run("slice", source, "--vc", "no", "-o", out)[0] == 2


def test_generate_and_fit(put: Put, run: Type, tmp_path: Path) -> None:
    text = "jobs: 500\narrivals: {per_hour: 60}\nsizes: [{gpus: 1, share: 1}]\nrun_time: {parts: [{median: 10m}]}\n"
    one, two, spec = tmp_path / "1.npz", tmp_path / "2.npz", tmp_path / "w.yaml"
    assert as_json(run("generate", put("w.yaml", text), "-o", one, "--seed", 4, "--json"))["jobs"] == 500
    run("generate", put("w.yaml", text), "-o", two, "--seed", 4)
    assert one.read_bytes()[100:] == two.read_bytes()[100:] or load(one).ids == load(two).ids
    assert run("fit", one, "-o", spec)[0] == 0
    assert run("generate", spec, "-o", two)[0] == 0
    assert len(load(two)) == 500


def test_help_and_mistakes(run: Type) -> None:
    code, text, _ = run()
    assert code == 0
    assert all(name in text for name in ("import", "stats", "slice", "scale", "generate", "fit"))
    code, _, errors = run("improt")
    assert (code, errors.count("\n")) == (2, 1)
    code, text, _ = run("stats", "/nonexistent", "--json")
    assert (code, list(json.loads(text))) == (2, ["error"])
