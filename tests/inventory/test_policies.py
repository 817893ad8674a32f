"""Policies: those that come along, a site's own, and what can be wrong with them."""

from pathlib import Path

import pytest

from gpusched.errors import FileError, UsageError
from gpusched.inventory import load_inventory
from gpusched.policies import BUILT_IN, load_policies, load_policy, policy_names

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
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUSCHED_POLICIES", raising=False)
    return tmp_path


def write(site: Path, policy: str) -> None:
    (site / "inventory.yaml").write_text(INVENTORY.format(policy))


def test_those_that_come_along(site: Path) -> None:
    for file in BUILT_IN.glob("*.yaml"):
        spec = load_policy(file)
        assert (spec.order, spec.place, spec.backfill) == STAGES[file.stem]
        assert spec.name == file.stem
        assert spec.description
        assert file.read_text().startswith("# ")
    assert policy_names(site / "inventory.yaml") == sorted(STAGES)
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
    assert len(set(versions)) == len(STAGES)
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


def test_an_unknown_policy(site: Path) -> None:
    write(site, "eazy")
    with pytest.raises(FileError) as caught:
        load_policies(load_inventory("inventory.yaml"))
    assert caught.value.line() == (
        'inventory.yaml:3: partitions.A.policy: found "eazy", expected one of easy, fairshare, fifo, fifo-skip, ljf, '
        f"naive, sjf, spread (of {BUILT_IN}): did you mean easy?"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("order: lifo\n", ':1: order: found "lifo", expected one of fifo, ljf, sjf, fairshare: did you mean fifo?'),
        ("place: [spread]\n", ":1: place: found a list, expected one of first-fit, best-fit, spread, naive"),
        ("\nbackfil: easy\n", ":2: backfil: found an unknown key, expected one of backfill, description, order, place: "
         "did you mean backfill?"),
        ("- easy\n", ":1: found a list, expected a mapping with order, place, backfill"),
        ("description: {}\n", ":1: description: found a mapping, expected a sentence"),
    ],
)  # fmt: skip
def test_errors(site: Path, text: str, expected: str) -> None:
    (site / "p.yaml").write_text(text)
    with pytest.raises(FileError) as caught:
        load_policy("p.yaml")
    assert caught.value.line() == f"p.yaml{expected}"
