"""An operator's rules on real nodes: maintenance, reservations, quotas, classes, and a controller that dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Cluster
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.one_partition, pytest.mark.processes]
LIMITS: dict[str, Any] = {
    "groups": {"vision": {"members": ["root"], "limits": {"gpus": 4}}},
    "limits": {"each_user": {"queued": 6}},
    "qos": {"spare": {"priority": -10, "exempt": True, "preemptible": True}},
}


@pytest.fixture
def limited(house: Cluster) -> Iterator[Cluster]:
    """The house with limits in its inventory, until the test is over."""
    before = house.inventory.read_text()
    part = house.inventory.with_suffix(".part")
    for text in (json.dumps(json.loads(before) | LIMITS), before):
        part.write_text(text)
        part.rename(house.inventory)
        if text != before:
            yield house
            house.clear()


def reason_of(cluster: Cluster, job: str) -> str:
    found = cluster.job(job)
    return found.reason if found else ""


def test_nothing_starts_that_cannot_end_before_a_maintenance(house: Cluster) -> None:
    window = house.json("maintenance", "dgx001", "--from", "now+1h", "--for", "1h", "--name", "disks")["name"]
    wait_until(lambda: [one["name"] for one in house.json("reservations")] == [window], 30, "the maintenance")
    late = house.sh("sleep 1000", "--gpus", "1", "--nodelist", "dgx001", "-t", "90")
    soon = house.sh("sleep 1000", "--gpus", "1", "--nodelist", "dgx001", "-t", "30")
    house.wait_state(soon, "RUNNING")
    wait_until(lambda: reason_of(house, late) == "ReqNodeNotAvail", 30, "a reason")
    why = house.json("why", late)
    assert "disks" in why["message"]
    assert "Reserved for maintenance" in why["message"]
    house.kill_controller()
    house.start_controller()
    again = house.sh("true", "--gpus", "1", "--nodelist", "dgx001", "-t", "10")
    house.wait_state(again, "COMPLETED")
    assert reason_of(house, late) == "ReqNodeNotAvail"
    clash = house.cli("maintenance", "dgx001", "dgx003", "--from", "now+90m", "--for", "1h", check=False)
    assert "disks" in clash.stderr
    house.cli("reservations", "cancel", window)
    house.wait_state(late, "RUNNING")


def test_a_reserved_node_is_for_those_it_is_for(house: Cluster) -> None:
    house.cli("reserve", "dgx003", "--for", "1h", "--users", "nobody", "--name", "course")
    wait_until(lambda: len(house.json("reservations")) == 1, 30, "the reservation")
    other = house.sh("true", "--gpus", "1", "--nodelist", "dgx003", "-t", "5")
    wait_until(lambda: reason_of(house, other) == "ReqNodeNotAvail", 30, "a reason")
    refused = house.cli("submit", "--gpus", "1", "-p", "A100", "--reservation", "course", "--", "true", check=False)
    assert refused.returncode != 0
    house.cli("reservations", "cancel", "course")
    house.wait_state(other, "COMPLETED")


def test_a_quota_holds_and_lets_go(limited: Cluster) -> None:
    first = limited.sh("sleep 1000", "--gpus", "3", "-p", "A100", "-t", "30", "-A", "vision")
    limited.wait_state(first, "RUNNING")
    second = limited.sh("true", "--gpus", "2", "-p", "A100", "-t", "30")
    small = limited.sh("true", "--gpus", "1", "-p", "A100", "-t", "30")
    limited.wait_state(small, "COMPLETED")
    wait_until(lambda: reason_of(limited, second) == "AssocGrpGRES", 30, "a reason")
    assert "limit of group vision: 3 of 4 GPUs in use; this job needs 2" in limited.json("why", second)["message"]
    outside = limited.sh("true", "--gpus", "2", "-p", "A100", "-t", "30", "-q", "spare")
    limited.wait_state(outside, "COMPLETED")
    limited.cli("cancel", first, "--now")
    limited.wait_state(second, "COMPLETED")
    many = limited.cli("submit", "--gpus", "1", "-p", "A100", "--array", "0-9", "--hold", "--", "true", check=False)
    assert many.returncode == 2
    assert "6" in many.stderr
    never = limited.cli("submit", "--gpus", "8", "-p", "A100", "--", "true", check=False)
    assert (never.returncode, never.stderr.count("\n")) == (2, 1)
    assert "AssocGrpGRES" in never.stderr
