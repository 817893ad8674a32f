"""``gpusched reproduce`` with what it cannot take: one line that says what, where and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gpusched.agents.dl2.decide import zero_actor
from gpusched.agents.dl2.weights import arrays_of
from gpusched.agents.dl2.workloads import Dl2Setting, draw
from gpusched.cli import main as cli
from gpusched.config.weights import save_model
from tests.traces.samples import real

HEADER = "model,gpus,nodes,beside_model,beside_gpus,beside_nodes,ratio\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, job = tmp_path_factory.mktemp("input"), {"arrival_slot": 0, "model": "m", "epochs": 3}
    job |= {"steps_per_epoch": 10, "worker": [2, 4], "server": [2, 0]}
    for name, change in (("good", {}), ("bad", {"epochs": 0}), ("stuck", {"worker": [8, 8]})):
        text = json.dumps([{"setting": "s", "nodes": 1, "seed": 0, "jobs": [job | change]}])
        (folder / f"{name}.json").write_text(text)
    for name, model in (("m", "m"), ("other", "n"), ("twice", "m")):
        lines = [f"('{model}', 'dist_sync', 32, {s}, 1, [2.0], [1.0], [1.0])\n" for s in (1, 2)]
        (folder / f"{name}.txt").write_text("".join(lines) + (lines[0] if name == "twice" else ""))
    (folder / "one.json").write_bytes(msgspec.json.encode([draw(Dl2Setting(4, 3, 1), 1)]))
    save_model(folder / "half.safetensors", "dl2", arrays_of({"trained": zero_actor()}), {})
    (folder / "empty.yaml").write_text("top: {}\n")
    (folder / "tiny.yaml").write_text("top: {nodes: [a]}\n")
    (folder / "wrong.csv").write_text(HEADER + "a,2,2,a,2,2,-1\n")
    (folder / "half.csv").write_text(HEADER + "a,2,2,a,2,2,0.5\na,2,2,b,2,2,0.5\n")
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gist --trace log.csv", "--trace does not apply to gist; it is for rltune"),
        ("gist --restart 0s", "--restart does not apply to gist; it is for dl2"),
        ("gist --device cuda", "--device does not apply to gist; it is for dl2"),
        ("rltune --jobs 2", "--jobs does not apply to rltune; it is for gist, dl2, maifs, topology"),
        ("rltune --vc a", "--vc needs a log; --trace FILE"),
        ("rltune --seed 0 --seed 1", "rltune trains with one seed"),
        ("dl2 --html page.html", "--html does not apply to dl2; it is for gist, rltune"),
        ("dl2 --workloads one.json --out w", "--out is for training; nothing is trained with --workloads"),
        ("dl2 --policy drf --out w", "--out is for the agent's weights, but --policy names only rules"),
        ("dl2 --weights half.safetensors --device cuda", "--device is for training"),
        ("dl2 --quick --out good.json/w", "good.json: weights cannot be written there: File exists"),
        ("maifs --quick --out good.json/w", "good.json: weights cannot be written there: File exists"),
        ("topology --out .", "--out . is a folder; name a file in it"),
        ("maifs --change vgg-16:20:0.5", "--change does not apply to maifs; it is for dl2"),
        ("maifs --weights a --out b", "--weights and --out cannot be combined"),
        ("topology --workloads F", "--workloads does not apply to topology; it is for dl2, maifs"),
        ("dl2 --policy sjf", "no policy of this setting is named 'sjf'; known: drf, optimus"),
        ("dl2 --workloads nothing.json", "nothing.json: No such file or directory"),
        ("dl2 --workloads bad.json", "bad.json: found Expected `float` > 0.0 - at `$[0].jobs[0].epochs`, expected"),
        ("dl2 --workloads good.json --speeds twice.txt", "twice.txt: found m with 1 servers and 1 workers twice"),
        ("dl2 --workloads good.json --speeds other.txt", "no measured speed of m; see --speeds"),
        ("dl2 --workloads good.json --speeds m.txt --seed 7", "no workload of seed 7; it has 0"),
        ("dl2 --workloads stuck.json --speeds m.txt --policy drf", "1 jobs are left that nothing runs on 1 nodes"),
        ("dl2 --workloads one.json --change vgg-16:20", "--change 'vgg-16:20'; expected MODEL:SLOT:FACTOR, such as"),
        ("dl2 --workloads one.json --change vgg-16:-1:2", "expected MODEL:SLOT:FACTOR"),
        ("dl2 --workloads one.json --restart soon", "--restart 'soon' is not a duration; for example 120s"),
        ("dl2 --workloads one.json --weights none.safetensors", "none.safetensors"),
        ("dl2 --workloads one.json --weights half.safetensors", "untrained.linear is missing"),
        ("maifs --workloads nowhere", "nowhere/philly_2017.csv.gz: there is no such trace"),
        ("maifs --policy sjf", "no policy of this setting is named 'sjf'; known: proportional, las"),
        ("maifs --speeds nowhere", "nowhere/synergy_sensitivity.json: no such file or folder of measurements"),
        ("topology --policy sjf", "no policy of this setting is named 'sjf'; known: random, load-balancing"),
        ("topology --load 0", "--load 0 is not a load"),
        ("topology --topology none.yaml", "none.yaml"),
        ("topology --topology empty.yaml", "empty: no switch has nodes"),
        ("topology --topology tiny.yaml --quick", "no job of 16 GPUs"),
        ("topology --gpus-per-node 4", "--gpus-per-node needs a file of nodes; --topology FILE"),
        ("topology --topology 16x4 --nic 400G", "--nic needs a file of nodes"),
        ("topology --topology tiny.yaml --nic fast", "--nic: found 'fast', expected a rate; such as 100G"),
        ("topology --topology tiny.yaml --gpus-per-node 0", "--gpus-per-node must be at least 1, found 0"),
        ("topology --table none.csv", "none.csv: No such file"),
        ("topology --table wrong.csv", "wrong.csv:2: found"),
        ("topology --table half.csv", "half.csv: found no ('b', 2, 2) beside ('a', 2, 2)"),
    ],
)
def test_bad_input_is_a_one_line_error(
    folder: Path, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    _check_error(words, said, capfd)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "bad/synergy_sensitivity.json:1: found a JSON error"),
        ("{}", "bad/synergy_sensitivity.json: models/alexnet_1: found something else"),
    ],
)
def test_bad_measurements_are_a_one_line_error(
    tmp_path: Path, content: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = real("../profiles/synergy_sensitivity.json").parent
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/synergy_sensitivity.json").write_text(content)
    for name in ("restart_seconds.csv", "placement"):
        (tmp_path / "bad" / name).symlink_to(source / name)
    monkeypatch.chdir(tmp_path)
    _check_error("maifs --speeds bad", said, capfd)


def _check_error(words: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = cli.run(["reproduce", *words.split()])
    err = capfd.readouterr().err
    assert code != 0
    assert said in err
    assert len(err.splitlines()) == 1
