"""`gpusched replay --topology`: jobs of a trace that links and neighbours slow down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.study.place import Place

JOB = "{0} {1} -1 {2} 2 -1 -1 2 9000 -1 1 1 1 -1 1 -1 -1 -1\n"
LOG = JOB.format(1, 0, 4000) + JOB.format(2, 0, 5000) + JOB.format(3, 1, 800)  # 2 GPUs each
WORDS = ("log.swf", "--gpus-per-node", "3", "-P", "fifo-skip")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    place.trace.write_text(LOG)
    (tmp_path / "racks.yaml").write_text("r1: {nodes: [a], uplink: 100G}\nr2: {nodes: [b], uplink: 100G}\n")
    return place


def test_a_job_over_two_nodes_is_slower_and_one_that_waits_for_one_is_not(place: Place) -> None:
    """One GPU is free on each node."""
    (waits,) = place.rows(*WORDS, "--topology", "racks.yaml", "--placement", "rack-wait")
    assert waits["mean_jct_s"] == pytest.approx((4000 + 5000 + 3999 + 800) / 3)
    (spread,) = place.rows(*WORDS, "--topology", "racks.yaml", "--placement", "best-fit")
    assert (4000 + 5000 + 800) / 3 < spread["mean_jct_s"] < waits["mean_jct_s"]
    said = "what links cost by aws figures of bert, cifar10, deepspeech2, imagenet, ncf, yolov3: 0 jobs by their model"
    assert said in str(spread["notes"])


def test_live_policies_are_replayed_with_their_backfill_and_their_wait(place: Place) -> None:
    """Two jobs hold 2 of 3 GPUs of each node, one for 4000 s and one for 5000; one of 2 waits for one node."""
    words = ("log.swf", "--gpus-per-node", "3", "--topology", "racks.yaml")
    (waits,) = place.rows(*words, "-P", "rack-wait")
    assert waits["mean_jct_s"] == pytest.approx((4000 + 5000 + 3999 + 800) / 3)
    (place.trace.parent / "short.yaml").write_text("place: rack-wait\nplacement_wait: 1000s\nbackfill: easy\n")
    (gives_up,) = place.rows(*words, "-P", "short.yaml")
    (at_once,) = place.rows(*words, "-P", "rack")
    assert at_once["mean_jct_s"] < gives_up["mean_jct_s"] < waits["mean_jct_s"]
    place.trace.write_text(LOG + JOB.format(4, 2, 500).replace(" 2 -1 -1 2 ", " 1 -1 -1 1 ").replace("9000", "600"))
    (short,) = place.rows(*words, "-P", "rack-wait")
    assert short["mean_jct_s"] == pytest.approx((4000 + 5000 + 3999 + 800 + 500) / 4), "it ends before the rack is free"
    (cheap,) = place.rows(*words, "-P", "easy", "--placement", "contention")
    assert cheap["placement"] == "contention"


def test_resizable_jobs_are_slowed_down_by_those_beside_them(place: Place) -> None:
    """Two of two GPUs on a node share its bus."""
    place.trace.write_text("".join(JOB.format(n, 50 * n, 900 + 100 * (n % 3)) for n in range(1, 13)))
    words = ("log.swf", "--gpus-per-node", "4", "-P", "elastic", "--resizable", "1-4", "--restart", "10s")
    (free,) = place.rows(*words, "-N", "2", "--placement", "best-fit")
    for rule in ("best-fit", "rack-wait", "contention"):
        (slowed,) = place.rows(*words, "--topology", "racks.yaml", "--placement", rule)
        assert slowed["placement"] == rule
        assert slowed["restarts"] > 5
        assert slowed["mean_jct_s"] > free["mean_jct_s"]


def test_first_fit_without_backfill_is_replayed_as_live(place: Place) -> None:
    """The third job needs both nodes, which the second frees last; a fourth of one GPU waits for its end."""
    more = JOB.format(4, 2, 500).replace(" 2 -1 -1 2 ", " 1 -1 -1 1 ")
    place.trace.write_text(LOG.replace("3 1 -1 800 2 -1 -1 2", "3 1 -1 800 6 -1 -1 6") + more)
    (strict,) = place.rows("log.swf", "--gpus-per-node", "3", "--topology", "racks.yaml", "-P", "fifo")
    (passes,) = place.rows("log.swf", "--gpus-per-node", "3", "--topology", "racks.yaml", "-P", "fifo-skip")
    assert passes["mean_wait_s"] == pytest.approx(4999 / 4)
    assert strict["mean_wait_s"] == pytest.approx((4999 + 5000 + 800 - 2) / 4)


def test_contention_says_where_it_can_only_be_blind(place: Place) -> None:
    words = ("log.swf", "--gpus-per-node", "3", "-P")
    (blind,), (rack,) = (place.rows(*words, policy) for policy in ("contention", "rack"))
    assert blind["mean_jct_s"] == rack["mean_jct_s"]
    assert "contention: without --topology placement costs are unknown" in str(blind["notes"])
    (row,) = place.rows(*WORDS, "--topology", "racks.yaml", "--placement", "contention")
    assert "contention: without --topology" not in str(row["notes"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("-P", "fifo+conservative", "--placement", "contention"),
            "fifo+conservative (placement contention) cannot be replayed with placement costs",
        ),
        (
            ("-P", "elastic", "--placement", "tetris"),
            "elastic (placement tetris) cannot be replayed with placement costs; contention goes with policies",
        ),
        (("-P", "las", "--placement", "contention"), "las (placement contention) cannot be replayed with placement"),
        (("--placement", "rack", "-N", "2"), "the topology names none of the nodes"),
    ],
)
def test_unsupported_options_are_a_one_line_error(place: Place, words: tuple[str, ...], said: str) -> None:
    _, error = place.run(*WORDS, "--topology", "racks.yaml", *words, code=2)
    assert said in error
    assert len(error.strip().splitlines()) == 1
