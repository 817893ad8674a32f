"""``gpusched train``, in this process but for a training that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpusched.agents.common.request import TrainerResult
from gpusched.agents.gist.networks import heuristic
from gpusched.cli import main as cli
from gpusched.config.policies import BUILT_IN
from gpusched.config.weights import load_model

GPUSCHED = str(Path(sys.executable).parent / "gpusched")
INVENTORY = Path(__file__).parents[2] / "inventory.yaml"
QUICK = "{variant: masked, episodes: 60, clusters: 8}"
LONGER = "{variant: wait, gap_h: 24, episodes: 600, clusters: 8, every: 60, begin: 200, batch: 64, updates: 1}"


class Site:
    """A folder with the paper's inventory and a policy; ``start`` is a process of its own, which has to load torch."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd
        (folder / "policies").mkdir()
        (folder / "inventory.yaml").write_text(INVENTORY.read_text("utf-8"), encoding="utf-8")
        self.env = os.environ | {
            "GPUSCHED_INVENTORY": str(folder / "inventory.yaml"), "GPUSCHED_STATE": str(folder / "state"),
        }  # fmt: skip

    def policy(self, train: str, name: str = "mine") -> str:
        text = f"agent: gist\nfallback: easy\ntrain: {train}\n"
        (self.folder / "policies" / f"{name}.yaml").write_text(text, encoding="utf-8")
        return f"policies/{name}.yaml"

    def start(self, *words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [GPUSCHED, "train", *words], stdout=pipe, stderr=pipe, text=True, env=self.env, cwd=self.folder
        )

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Returns stdout and stderr."""
        self._capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GPUSCHED_INVENTORY", self.env["GPUSCHED_INVENTORY"])
            patch.setenv("GPUSCHED_STATE", self.env["GPUSCHED_STATE"])
            patch.chdir(self.folder)
            found = cli.run(["train", *words])
        out, err = self._capfd.readouterr()
        assert found == code, out + err
        return out, err

    def call(self, *words: str, code: int = 0) -> str:
        """Returns what went to stderr."""
        return self.run(*words, code=code)[1]


@pytest.fixture
def site(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Site:
    return Site(tmp_path, capfd)


def test_one_agent_per_partition_with_weights_card_and_table(site: Site) -> None:
    out, _ = site.run(site.policy(QUICK), "--seed", "0", "--seed", "1", "--json")
    made: list[dict[str, Any]] = json.loads(out)
    assert [m["partition"] for m in made] == ["A100", "V100"]
    folder = site.folder / "policies" / "mine"
    assert sorted(f.name for f in folder.iterdir()) == [
        "A100.card.yaml", "A100.safetensors", "V100.card.yaml", "V100.safetensors", "policy.yaml",
    ]  # fmt: skip
    for one in made:
        card = yaml.safe_load((site.folder / one["card_file"]).read_text("utf-8"))
        model = load_model(folder, one["partition"], "gist")
        assert card["weights"] == model.digest
        assert (card["seeds"], card["device"], card["agent"]) == ([0, 1], "cpu", "gist")
        assert [(n["count"], n["gpus"]) for n in card["inventory"]] == [(2, 8)]
        assert card["hyper_parameters"]["episodes"] == 60
        values = {row["policy"]: row["value"] for row in card["metrics"]}
        assert values["mine (masked)"] == pytest.approx(0.7409, rel=0.01)
        assert values["best online"] == pytest.approx(0.7409, abs=1e-4)
        assert values["starts whatever fits, worst servers"] == pytest.approx(0.7409, abs=1e-4)
        assert 0 < values["untrained start"] <= values["mine (masked)"]
        assert card["decides"] == one["card"]["decides"]
        assert card["decides"].startswith("a neural network of width ")
        assert "it decides on the 2 servers that it was trained for" in card["decides"]
        assert values["naive"] == pytest.approx(0.622, abs=1e-3)
        assert one["card"]["trace"]["sha256"] == card["trace"]["sha256"]


def test_the_table_is_for_people_and_one_partition_is_enough(site: Site) -> None:
    out, _ = site.run(site.policy(QUICK), "--partition", "V100", "--out", "elsewhere")
    assert out.startswith("V100: gist trained on ")
    assert "mine (masked)" in out
    assert "weights: elsewhere/V100.safetensors" in out
    assert {f.name for f in (site.folder / "elsewhere").iterdir()} == {
        "V100.card.yaml", "V100.safetensors", "policy.yaml",
    }  # fmt: skip
    content = (site.folder / "elsewhere" / "V100.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header) == sorted(header)  # else the same weights would not have the same digest
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])
    assert yaml.safe_load((site.folder / "elsewhere" / "policy.yaml").read_text())["agent"] == "gist"


def test_a_killed_training_goes_on_and_ends_as_if_it_had_not_been(site: Site) -> None:
    words = (site.policy(LONGER), "--partition", "A100", "--seed", "4", "--keep-anyway")
    checkpoint = site.folder / "killed" / ".A100-seed4.checkpoint"
    process = site.start(*words, "--out", "killed")
    while not checkpoint.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (site.folder / "killed" / "A100.safetensors").exists()
    err = site.call(*words, "--out", "killed")
    assert "goes on from episode" in err
    assert not checkpoint.exists()
    site.call(*words, "--out", "whole")
    whole, killed = (load_model(site.folder / name, "A100", "gist").digest for name in ("whole", "killed"))
    assert whole == killed


def swf(jobs: int) -> str:
    lines = [f"{i} {60 * i} -1 100 {1 + i % 8} -1 -1 {1 + i % 8} 200 -1 1 1 1 -1 1 -1 -1 -1\n" for i in range(jobs)]
    return "; UnixStartTime: 1500000000\n" + "".join(lines)


def test_few_jobs_are_refused_by_number_and_weights_never_go_into_the_package(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = heuristic(8)
    done = TrainerResult(arrays=arrays, about={"knows": "limit", "backfill": "easy"}, score=0.0, hyper_parameters={})
    monkeypatch.setattr("gpusched.agents.gist.train.train_agent", lambda job, report: done)  # it takes a minute
    monkeypatch.setattr("gpusched.agents.rltune.train.train_agent", lambda job, report: done)
    (site.folder / "few.swf").write_text(swf(3))
    (site.folder / "more.swf").write_text(swf(130))
    (site.folder / "policies").rmdir()
    for name in ("gist", "rltune"):
        err = site.call(name, "--trace", "few.swf", "-N", "1", "--hold-out", "0", code=2)
        assert "too few jobs to train on (default: 3); at least 100 are needed" in err
        assert "--force" in err
    assert not (site.folder / "policies").exists()
    err = site.call("gist", "--trace", "few.swf", "-N", "1", "--hold-out", "0", "--force", "--keep-anyway")
    assert "too few jobs to train on (default: 3)" in err
    own = site.folder / "policies/gist"
    assert sorted(f.name for f in own.iterdir()) == ["default.card.yaml", "default.safetensors", "policy.yaml"]
    more = ("--trace", "more.swf", "-N", "1", "--keep-anyway")
    assert "too few" not in site.call("gist", *more, "--out", "elsewhere")
    assert (site.folder / "elsewhere/default.safetensors").is_file()
    assert not list(BUILT_IN.rglob("gist/*"))
    (site.folder / "linked").symlink_to(BUILT_IN)
    err = site.call("linked/gist.yaml", "--trace", "more.swf", "-N", "1", "--out", "linked/gist", code=2)
    assert "part of gpusched itself" in err
    assert "use --out FOLDER" in err
    monkeypatch.setenv("GPUSCHED_POLICIES", str(site.folder / "linked"))
    assert "part of gpusched itself" in site.call("gist", "--trace", "more.swf", "-N", "1", code=2)
    assert not (BUILT_IN / "gist").exists()
    assert "did you mean 'gist'" in site.call("gits", "--trace", "more.swf", code=2)


def test_errors_are_one_line(site: Site) -> None:
    (site.folder / "policies" / "plain.yaml").write_text("order: fifo\n")
    assert "has no agent to train" in site.call("policies/plain.yaml", code=2)
    err = site.call(site.policy("{variant: masked, episodez: 3}"), code=2)
    assert "no hyper-parameter 'episodez'" in err
    assert "episodes" in err
    assert "there is no partition 'A10'" in site.call(site.policy(QUICK), "--partition", "A10", code=2)
    assert "neither cpu nor cuda" in site.call(site.policy(QUICK), "--device", "tpu", code=2)
    assert "neither cpu nor cuda" in site.call("maifs", "--device", "tpu", code=2)
    for agent in ("rltune", "maifs", "gist"):
        err = site.call(agent, "--device", "cuda", code=2)
        assert f"--device cuda: agent {agent} of {agent} trains on the CPU only; omit it" in err
    (site.folder / "file").write_text("")
    err = site.call(site.policy(QUICK), "--out", "file/below", code=1)
    assert "weights cannot be written there" in err
    assert "--out" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gist --load 0.9", "--load needs a workload; name one with --trace or --generate, or omit it"),
        ("gist --nodes 4", "--nodes needs a workload"),
        ("maifs --gpus-per-node 4 --inventory inventory.yaml", "--gpus-per-node needs a workload"),
        ("gist --format swf", "--format needs a workload; name one with --trace, or omit it"),
        ("gist --vc a --generate w.yaml", "--vc needs a workload; name one with --trace"),
        ("gist --generate w.yaml --since 3d", "--since selects recorded jobs; --generate draws them"),
        ("gist --trace a --generate b", "--trace and --generate cannot be combined"),
        ("gist --hold-out 1", "--hold-out 1: expected a fraction"),
        ("gist --hold-out -0.1", "--hold-out -0.1: expected a fraction"),
        ("mine --trace few.swf", "--trace does not apply to mine; its variant masked trains on episodes"),
    ],
)
def test_options_that_do_not_apply_are_refused(site: Site, words: str, said: str) -> None:
    site.policy(QUICK)
    err = site.call(*words.split(), code=2)
    assert said in err
    assert err.count("\n") == 1


def test_options_are_checked_before_torch_is_loaded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.agents.common.torch_.require", pytest.fail)
    assert "none.csv" in site.call("dl2", "--trace", "none.csv", "-N", "1", code=2)


def test_a_gpu_that_is_not_there_is_refused_before_any_work(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    err = site.call("dl2", "--trace", "none.csv", "--device", "cuda", code=1)
    assert "--device cuda: torch finds no GPU here; omit it to train on the CPU" in err
