"""Policies: those that come along, a site's own, and what can be wrong with them."""

import json
from pathlib import Path

import numpy as np
import pytest

from gpusched.config.inventory import load_inventory
from gpusched.config.policies import BUILT_IN, load_policies, load_policy, names_in, policy_folders
from gpusched.config.weights import ModelError, digest_of, load_file, load_model, save_model
from gpusched.errors import FileError, UsageError
from gpusched.model.policy import PreemptionSettings, Resizing
from gpusched.sim.orders import folders_in_force

INVENTORY = (
    "partitions:\n  A:\n    policy: {}\n    nodes: [{{name: n, gpus: 1, cores: 1, memory: 1G, runtime: podman}}]\n"
)
STAGES = {
    "fifo": ("fifo", "first-fit", "none"),
    "fifo-skip": ("fifo", "first-fit", "skip"),
    "easy": ("fifo", "best-fit", "easy"),
    "ljf": ("ljf", "first-fit", "skip"),
    "sjf": ("sjf", "best-fit", "skip"),
    "fairshare": ("fairshare", "best-fit", "easy"),
    "spread": ("fifo", "spread", "easy"),
    "naive": ("fifo", "naive", "skip"),
    "rack": ("fifo", "rack", "easy"),
    "rack-wait": ("fifo", "rack-wait", "easy"),
    "contention": ("fifo", "contention", "easy"),
    **dict.fromkeys(("elastic", "drf", "optimus", "proportional", "sia"), ("fifo", "best-fit", "easy")),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUSCHED_POLICIES", raising=False)
    return tmp_path


def write(site: Path, policy: str) -> None:
    (site / "inventory.yaml").write_text(INVENTORY.format(policy))


# and their fallbacks
RLTUNE = ("rltune", "rltune-limit", "rltune-milp", "rltune-nothing", "rltune-preempt")
AGENTS = dict.fromkeys(("gist", *RLTUNE), "easy") | {
    "dl2": "elastic",
    "maifs": "elastic",
    "topology": "contention",
}


def test_those_that_come_along(site: Path) -> None:
    for file in BUILT_IN.glob("*.yaml"):
        spec = load_policy(file)
        if file.stem in AGENTS:
            assert spec.agent
            assert spec.fallback is not None
            assert spec.fallback.name == AGENTS[file.stem]
        else:
            assert (spec.order, spec.place, spec.backfill) == STAGES[file.stem]
        assert spec.name == file.stem
        assert spec.description
        assert file.read_text().startswith("# ")
    assert names_in(policy_folders(site / "inventory.yaml")) == sorted({*STAGES, *AGENTS})
    assert (Path(__file__).parents[2] / "policies").resolve() == BUILT_IN.resolve()


def test_a_version_is_the_meaning(site: Path) -> None:
    (site / "a.yaml").write_text("order: sjf\n")
    (site / "b.yaml").write_text("# a comment\nbackfill: none\nplace: first-fit\norder: sjf\ndescription: the same\n")
    (site / "c.yaml").write_text("order: ljf\n")
    a, b, c = (load_policy(site / f"{n}.yaml").version for n in "abc")
    assert a == b != c
    assert len(a) == 12
    assert int(a, 16) >= 0
    versions = [load_policy(f).version for f in BUILT_IN.glob("*.yaml")]
    assert len(set(versions)) == len(STAGES) + len(AGENTS)
    assert load_policy(BUILT_IN / "fifo.yaml").version == "a57a314e5e77"


def test_a_site_s_own_goes_first(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(site, "sjf")
    assert load_policies(load_inventory("inventory.yaml"))["A"].place == "best-fit"
    (site / "policies").mkdir()
    (site / "policies/sjf.yaml").write_text("order: sjf\nplace: spread\n")
    assert load_policies(load_inventory("inventory.yaml"))["A"].place == "spread"
    (site / "named").mkdir()
    (site / "named/sjf.yaml").write_text("order: sjf\nplace: naive\n")
    monkeypatch.setenv("GPUSCHED_POLICIES", str(site / "named"))
    assert load_policies(load_inventory("inventory.yaml"))["A"].place == "naive"
    write(site, "easy")
    assert load_policies(load_inventory("inventory.yaml"))["A"].name == "easy"
    monkeypatch.setenv("GPUSCHED_POLICIES", str(site / "nowhere"))
    with pytest.raises(UsageError, match="which is not a folder"):
        load_policies(load_inventory("inventory.yaml"))


def test_replays_of_a_named_folder_need_no_inventory(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCHED_POLICIES", str(site))
    assert folders_in_force() == (site, BUILT_IN)


def test_an_unknown_policy(site: Path) -> None:
    write(site, "eazy")
    with pytest.raises(FileError) as caught:
        load_policies(load_inventory("inventory.yaml"))
    assert caught.value.line() == (
        'inventory.yaml:3: partitions.A.policy: found "eazy", expected one of contention, dl2, drf, easy, elastic, '
        "fairshare, fifo, fifo-skip, gist, ljf, maifs, naive, optimus, proportional, rack, rack-wait, rltune, "
        "rltune-limit, rltune-milp, rltune-nothing, rltune-preempt, sia, sjf, spread, topology "
        f"(of {BUILT_IN}): did you mean easy?"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("order: lifo\n", ':1: order: found "lifo", expected one of fifo, ljf, sjf, sjf-estimate, fairshare, smallest, '
         "lpt-limit: did you mean fifo?"),
        ("order: sjf-estimate\nbackfill: easy\n", ':2: backfill: found "easy", expected none or skip with order: '
         "sjf-estimate"),
        ("order: sjf-estimate\nbackfill: conservative\n", ':2: backfill: found "conservative", expected none or skip '
         "with order: sjf-estimate"),
        ("backfill: conservative\nplace: milp\n", ':1: backfill: found "conservative", expected none, skip or easy '
         "with place: milp"),
        ("backfill: conservative\nagent: gist\n", ':1: backfill: found "conservative", expected none, skip or easy '
         "with an agent"),
        ("place: [spread]\n", ":1: place: found a list, expected one of first-fit, best-fit, spread, naive, "
         "fastest, milp, rack, rack-wait, contention"),
        ("place: rack\nplacement_wait: 1h\n", ":2: placement_wait: found it without, expected this only with place: "
         "rack-wait or contention"),
        ("place: rack-wait\nplacement_wait: long\n", ':2: placement_wait: found "long", expected a time, such as 24h; '
         "0s: none"),
        ("\nbackfil: easy\n", ":2: backfil: found an unknown key, expected one of agent, backfill, description, "
         "mapping, order, place, placement_wait, resize, sizes, ties: did you mean backfill?"),
        ("order: fifo\nties: last\n", ":2: ties: found it with another, expected this only with order: sjf-estimate"),
        ("order: sjf-estimate\nties: random\n", ':2: ties: found "random", expected one of first, last'),
        ("- easy\n", ":1: found a list, expected a mapping with order, place, backfill"),
        ("description: {}\n", ":1: description: found a mapping, expected a sentence"),
        ("sizes: large\n", ':1: sizes: found "large", expected one of base, greedy-gain, drf, optimus, '
         "proportional, sia"),
        ("sizes: greedy-gain\norder: sjf\n", ":1: sizes: found it with another, expected this only with order: fifo "
         "and without an agent"),
        ("resize: {min_run: 1m}\n", ":1: resize: found it without, expected this only with a policy "
         "that chooses sizes"),
        ("sizes: greedy-gain\nresize: {min_run: soon}\n", ':2: resize.min_run: found "soon", expected a time, such as '
         "10m; 0s: none"),
        ("sizes: greedy-gain\nresize: {per_hour: 0}\n", ":2: resize.per_hour: found 0, expected a whole number from "
         "1 to 3600"),
        ("sizes: greedy-gain\nresize: {speed: 1}\n", ":2: resize.speed: found an unknown key, expected one of "
         "gain, min_run, per_hour, "
         "start_timeout"),
    ],
)  # fmt: skip
def test_errors(site: Path, text: str, expected: str) -> None:
    (site / "p.yaml").write_text(text)
    with pytest.raises(FileError) as caught:
        load_policy("p.yaml")
    assert caught.value.line() == f"p.yaml{expected}"


def test_brakes_on_resizes_are_read_and_count_for_the_version(site: Path) -> None:
    (site / "p.yaml").write_text(
        "sizes: greedy-gain\nresize: {min_run: 0s, per_hour: 9, start_timeout: 2m, gain: 0.5}\n"
    )
    (site / "q.yaml").write_text("sizes: greedy-gain\n")
    (site / "r.yaml").write_text("sizes: base\n")
    p, q, r = (load_policy(site / f"{name}.yaml") for name in "pqr")
    assert (p.sizes, p.resize) == ("greedy-gain", Resizing(min_run_s=0.0, per_hour=9, start_timeout_s=120.0, gain=0.5))
    assert len({p.version, q.version, r.version}) == 3
    assert r.version == load_policy(BUILT_IN / "fifo.yaml").version, "nothing is resized by it"


AGENT = "agent: gist\nfallback: sjf\nbudget: 50ms\ntrain:\n  episodes: 12\n  rate: 0.5\n  dueling: true\n"


def test_an_agent_s_file_and_its_folder(site: Path) -> None:
    (site / "mine.yaml").write_text(AGENT)
    spec = load_policy("mine.yaml")
    assert (spec.name, spec.agent, spec.budget_s, spec.folder) == ("mine", "gist", 0.05, "mine")
    assert spec.fallback is not None
    assert (spec.fallback.name, spec.fallback.order) == ("sjf", "sjf")
    assert spec.settings == {"episodes": 12, "rate": 0.5, "dueling": True}
    untrained = spec.version
    (site / "mine").mkdir()
    (site / "mine/policy.yaml").write_text(AGENT)
    (site / "mine/A.safetensors").write_bytes(b"weights")
    trained = load_policy("mine.yaml")
    assert trained.version != untrained
    # the folder is the same policy, wherever it is moved to
    (site / "mine").rename(site / "moved")
    moved = load_policy("moved")
    assert (moved.name, moved.version, moved.folder) == ("moved", trained.version, "moved")


def test_keys_of_earlier_versions_are_read(site: Path) -> None:
    for name, key in (("old", "place_wait"), ("new", "placement_wait")):
        (site / f"{name}.yaml").write_text(f"place: rack-wait\n{key}: 1h\n")
    old, new = load_policy("old.yaml"), load_policy("new.yaml")
    assert (old.placement_wait_s, old.version) == (3600.0, new.version)


def test_which_of_equals_goes_first_is_part_of_the_version(site: Path) -> None:
    for ties in ("first", "last"):
        (site / f"{ties}.yaml").write_text(f"order: sjf-estimate\nties: {ties}\nbackfill: skip\n")
    (site / "plain.yaml").write_text("order: sjf-estimate\nbackfill: skip\n")
    first, last, plain = (load_policy(f"{name}.yaml") for name in ("first", "last", "plain"))
    assert (first.ties, last.ties, plain.ties) == ("first", "last", "first")
    assert first.version == plain.version != last.version


def test_an_agent_that_chooses_nodes(site: Path) -> None:
    (site / "one.yaml").write_text("agent: topology\n")
    (site / "four.yaml").write_text("agent: topology\nschedulers: 4\nfallback: rack-wait\nbackfill: skip\n")
    one, four = (load_policy(f"{name}.yaml") for name in ("one", "four"))
    assert one.fallback is not None
    assert (one.schedulers, one.fallback.name, one.order, one.place) == (1, "contention", "fifo", "contention")
    assert (one.backfill, one.placement_wait_s, one.uses_job_class_estimates) == ("easy", 86400.0, True)
    assert four.fallback is not None
    assert (four.schedulers, four.fallback.name, four.place, four.backfill) == (4, "rack-wait", "contention", "skip")
    (site / "two.yaml").write_text("agent: topology\nschedulers: 2\n")
    assert len({one.version, load_policy("two.yaml").version, four.version}) == 3
    with pytest.raises(ModelError) as caught:
        load_model(Path(one.folder), "A", "topology")
    assert caught.value.message == "one/default.safetensors: no weights for A"


def test_weights_that_are_replaced_while_they_are_read(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "p.yaml").write_text("agent: rltune\n")
    (site / "p").mkdir()
    file, other, read_bytes = site / "p" / "default.safetensors", site / "other", Path.read_bytes
    for number, path in ((1.0, file), (2.0, other)):
        save_model(path, "rltune", {"w": np.array([number])})

    def replaced(path: Path) -> bytes:
        content = read_bytes(path)
        other.replace(file)
        return content

    before = read_bytes(file)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", replaced)
        model = load_model(site / "p", "A", "rltune")
    assert (model.arrays["w"].tolist(), model.digest) == ([1.0], digest_of(before))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: read_bytes(site / "gone"))
        with pytest.raises(FileError, match="no such file or directory; expected weights"):
            load_policy("p.yaml")


def test_weights_of_numbers_that_numpy_lacks(site: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (site / "w").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(ModelError, match="these weights cannot be read: 'BF16'"):
        load_file(site / "w", "rltune")


def test_preemption_settings_bound_an_agent(site: Path) -> None:
    (site / "p.yaml").write_text("agent: rltune\n")
    plain = load_policy("p.yaml")
    assert plain.preempt == PreemptionSettings(min_run_s=600.0, per_hour=2, restart_s=30.0)
    (site / "p.yaml").write_text("agent: rltune\npreempt: {min_run: 0s, per_hour: 0, restart: 500ms}\n")
    bold = load_policy("p.yaml")
    assert bold.preempt == PreemptionSettings(min_run_s=0.0, per_hour=0, restart_s=0.5)
    assert bold.version != plain.version


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "agent: gits\n",
            'agent: found "gits", expected one of gist, rltune, dl2, maifs, topology: did you mean gist?',
        ),
        ("agent: gist\nfallback: esay\n", "expected a policy without an agent, such as easy: did you mean easy?"),
        ("agent: gist\nbudget: 0ms\n", "budget: found "),
        ("agent: gist\nbudget: fast\n", "expected a time, such as 200ms"),
        ("fallback: easy\n", "found an unknown key"),
        ("agent: gist\ntrain: 3\n", "expected a mapping of hyper-parameters"),
        ("agent: gist\nfallback: p\n", "a policy without an agent"),
        ("agent: rltune\npreempt: {min_rum: 1m}\n", "did you mean min_run"),
        ("agent: rltune\npreempt: {min_run: soon}\n", "expected a time, such as 10m; 0s: none"),
        ("agent: rltune\npreempt: {restart: -1s}\n", "expected a time"),
        ("agent: rltune\npreempt: {per_hour: 0.5}\n", "expected a whole number from 0 to 3600"),
        ("order: fifo\npreempt: {per_hour: 1}\n", "found an unknown key"),
        (
            "agent: gist\nschedulers: 2\n",
            "schedulers: found it with another, expected this only with an agent that chooses nodes: topology",
        ),
        ("agent: topology\nschedulers: 17\n", "schedulers: found 17, expected a whole number from 1 to 16"),
        ("schedulers: 2\n", "found an unknown key"),
        ("agent: topology\nplace: spread\n", 'place: found "spread", expected contention, by which this agent goes'),
    ],
)
def test_wrong_agents(site: Path, text: str, expected: str) -> None:
    (site / "p.yaml").write_text(text)
    with pytest.raises(FileError) as caught:
        load_policy("p.yaml")
    assert expected in caught.value.line()
