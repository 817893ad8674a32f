"""An agent on real nodes: trained, tried in the shadow, promoted, its files spoilt, healed, taken back."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster
from tests.promotion import weights
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.one_partition, pytest.mark.processes]

HOW = ("truncated", "NaN")  # every way: tests/promotion/test_agents.py


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    weights.compile_passes(tmp_path_factory.mktemp("warm"))


def live(cluster: Cluster) -> str:
    """Return the active policy of A100, as the controller has it."""
    with cluster.reader() as reader:
        change = reader.live_changes().get("A100") if reader else None
    return change.spec.name if change is not None else ""


def fallback(cluster: Cluster) -> str:
    """Why the agent of A100 is out, or ""."""
    with cluster.reader() as reader:
        out = reader.fallbacks().get("A100") if reader else None
    return out.why if out is not None else ""


def kinds(cluster: Cluster, *wanted: str) -> list[str]:
    with cluster.reader() as reader:
        assert reader is not None
        return [e.kind for e in reader.events(limit=100_000) if e.kind in wanted]


def decided_by(cluster: Cluster) -> str | None:
    """Run a job to its end; who started it."""
    job = cluster.submit("--gpus", "1")
    cluster.wait_state(job, "COMPLETED")
    return str(cluster.json("show", job)["policy"])


def trained(cluster: Cluster) -> Path:
    """A site's own policy `gist`, with weights."""
    folder = cluster.folder / "policies"
    folder.mkdir()
    (folder / "gist.yaml").write_text(weights.YAML)
    return weights.write(folder / "gist/A100.safetensors")


def test_shadow_promote_spoil_heal_and_roll_back(stopped: Cluster) -> None:
    cluster = stopped
    cluster.write_inventory({"tick": "500ms"})  # some forty of them are waited for
    folder = cluster.folder / "policies"
    folder.mkdir()
    (folder / "gist.yaml").write_text(weights.YAML + weights.QUICK)
    cluster.cli("train", str(folder / "gist.yaml"), "--partition", "A100", "--keep-anyway", timeout=300)
    cluster.start_controller()
    cluster.cli("policy", "shadow", "gist", "-p", "A100")
    wait_until(lambda: kinds(cluster, "shadow_began"), what="the shadow")
    assert decided_by(cluster) == "easy"
    wait_until(lambda: cluster.json("policy", "show", "gist")["shadows"][0]["decisions"] > 0, what="its decision")
    (shadow,) = cluster.json("policy", "show", "gist")["shadows"]
    assert shadow["late"] == shadow["unusable"] == 0
    refused = cluster.cli("policy", "promote", "gist", "-p", "A100", check=False)
    assert refused.returncode == 1
    assert "use --force REASON" in refused.stderr
    cluster.cli("policy", "promote", "gist", "-p", "A100", "--force", "we want to see it")
    wait_until(lambda: live(cluster) == "gist", what="the promotion")
    assert decided_by(cluster) == "gist"
    shutil.rmtree(folder / "gist")  # what is in charge is a copy
    (cluster.folder / "policies/gist.yaml").unlink()
    assert decided_by(cluster) == "gist"
    (frozen,) = (cluster.state / "policies").glob("*/gist/A100.safetensors")
    good = frozen.read_bytes()
    for n, how in enumerate(HOW):
        weights.break_file(frozen, how)
        wait_until(lambda: fallback(cluster) != "", what=f"the fallback ({how})")
        assert decided_by(cluster) == "easy"
        weights.put(frozen, good)
        wait_until(lambda: fallback(cluster) == "", what="the agent to be back")
        assert decided_by(cluster) == "gist"
        assert kinds(cluster, "agent_disabled", "agent_enabled") == ["agent_disabled", "agent_enabled"] * (n + 1)
    weights.break_file(frozen, "truncated")
    wait_until(lambda: fallback(cluster) != "", what="the fallback")
    waiting = cluster.submit("--gpus", "1", "--hold")
    cluster.wait_state(waiting, "PENDING")
    assert "A100: gist cannot decide (" in cluster.cli("status").stdout
    assert "A100: gist cannot decide (" in cluster.cli("why", waiting).stdout
    assert cluster.json("why", waiting)["fallback"].endswith("; falling back to easy")
    shutil.rmtree(cluster.state / "policies")
    cluster.cli("policy", "rollback", "its files are gone")
    wait_until(lambda: live(cluster) == "easy", what="the rollback")
    wait_until(lambda: fallback(cluster) == "", what="a decision of easy's own")
    assert decided_by(cluster) == "easy"
    acts = [(c["act"], c["name"]) for c in cluster.json("policy", "history", "-p", "A100")]
    assert acts == [("inventory", "easy"), ("promote", "gist"), ("rollback", "easy")]
    assert cluster.state_of(waiting) == "PENDING"


def test_an_agent_too_slow_for_its_budget(stopped: Cluster) -> None:
    cluster = stopped
    file = trained(cluster)
    slow = weights.YAML.replace("60s", "1ms")
    (cluster.folder / "policies/gist.yaml").write_text(slow)
    weights.write(file, width=500_000)  # some millions of weights to go through for every job
    cluster.write_inventory(policies={"A100": "gist"})
    cluster.start_controller()
    assert decided_by(cluster) == "easy"
    assert fallback(cluster) == "no answer within its time budget of 1 ms"
    assert decided_by(cluster) == "easy"
    assert kinds(cluster, "agent_disabled") == ["agent_disabled"]
    began = time.time()
    (cluster.folder / "policies/gist.yaml").write_text(weights.YAML)
    weights.write(file)
    wait_until(lambda: fallback(cluster) == "", what="other weights to be taken up")
    assert decided_by(cluster) == "gist"
    with cluster.reader() as reader:
        assert reader is not None
        assert float(reader.meta("heartbeat") or 0) > began
    assert json.loads(cluster.cli("policy", "list", "--json").stdout)[0]["fallback"] is None
