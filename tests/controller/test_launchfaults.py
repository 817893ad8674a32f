"""Whose fault a failed launch is: by words where they allow no doubt, by what else happened elsewhere."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpusched.controller.launchfaults import (
    Failures,
    Fault,
    fault_of,
    is_jobs_fault,
    is_suspicious,
    judge_nodes,
    with_failure,
    with_success,
)
from gpusched.model.jobs import JobRecord, JobState, Mount
from gpusched.model.resources import Inventory
from gpusched.queue.store import FailedLaunch, NodeRecord
from tests import builders
from tests.builders import spec
from tests.controller.imagined import inventory

OWN = spec(mounts=(Mount("/data/set", "/mnt/set"),), workdir="/work", command=("/opt/run", "x"))
START = 'unable to start container "5c": runc: runc create failed: unable to start container process: '
NOT_FOUND = ": OCI runtime attempted to invoke a command that was not found"
CDI = START + (
    'error during container init: error mounting "/usr/lib/libcuda.so.535" to rootfs at "/usr/lib/libcuda.so.535": '
    "stat /usr/lib/libcuda.so.535: no such file or directory" + NOT_FOUND
)
INIT = "Error: container-init binary not found on the host: stat /usr/libexec/podman/catatonit: no such file"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (CDI, Fault.NODE),
        (INIT, Fault.NODE),
        ("Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=0", Fault.NODE),
        ('exec: "/dev/init": executable file not found in $PATH', Fault.NODE),
        ('exec: "/dev/init": stat /dev/init: permission denied', Fault.NODE),
        ("open /run/runc/state.json: permission denied", Fault.NODE),
        ("error getting output of conmon: not a directory", Fault.NODE),
        ("copying blob sha256:1: no space left on device", Fault.NODE),
        ("mkdir: cannot create directory '/root/.local': Permission denied", Fault.NODE),
        ("refused: argument 3 contains a NUL byte", Fault.JOB),
        ("a line before\nrefused: /a leads out of /b", Fault.JOB),
        ("initializing source docker://nope:1: reading manifest 1 in docker.io: manifest unknown", Fault.JOB),
        ('initializing source docker://localhost/x: pinging container registry localhost: Get "..."', Fault.JOB),
        ("Error: repository name must be lowercase", Fault.JOB),
        ("OCI runtime error: crun: exec container process `/bin/sh`: Exec format error", Fault.OWN),
        ("choosing an image: no image found in image index for architecture amd64, variant x", Fault.OWN),
        ('exec: "nonsense": executable file not found in $PATH', Fault.JOB),
        ("crun: executable file `nonsense` not found in $PATH: No such file or directory", Fault.JOB),
        ('workdir "/work" does not exist on container d785', Fault.JOB),
        ("Error: statfs /data/set: no such file or directory", Fault.OWN),
        ("invalid mount config for type bind: bind source path does not exist: /data/set.", Fault.OWN),
        ("Error: statfs /data/set2: no such file or directory", Fault.NODE),
        ("Error: statfs /more/data/set: no such file or directory", Fault.NODE),
        ('chdir to cwd ("/work") set in config.json failed: permission denied', Fault.OWN),
        ("cannot write the output file /home/ann/1.out", Fault.OWN),
        ("sh: cannot create /full/1.out: No space left on device\ncannot write the output file /full/1.out", Fault.OWN),
        ("cannot write the file of --error /nowhere/1.err", Fault.OWN),
        ("Error: statfs /data/set: input/output error", Fault.OWN),
        ('Error: lstat "/data/set": No space left on device', Fault.OWN),
        ('error mounting "/x" to rootfs at "/mnt/set": mkdir /o/merged/mnt/set: read-only file system', Fault.OWN),
        ('error mounting "/x" to rootfs at "/mnt/set": mkdir /o/merged/mnt/set: no space left on device', Fault.NODE),
        ("mkdir /var/lib/containers/storage: read-only file system", Fault.NODE),
        ("invalid specification: destination can't be '/'", Fault.OWN),
        ("procHooks process: unable to set memory limit to 1048576 (current usage: 2433024)", Fault.OWN),
        ("Error response from daemon: Minimum memory limit allowed is 6MB", Fault.OWN),
        ("Range of CPUs is from 0.01 to 2.00, as there are only 2 CPUs available", Fault.OWN),
        ("requested access to the resource is denied", Fault.OWN),
        ("pinging container registry r.example: Get ...: dial tcp: i/o timeout", Fault.REGISTRY),
    ],
)
def test_words(error: str, fault: Fault) -> None:
    assert fault_of(error, OWN) == fault


def test_text_of_users_is_not_taken_for_the_engines_message() -> None:
    wrote = "/a: no space left on device"
    assert (
        fault_of(f"Error: statfs {wrote}: no such file or directory", spec(mounts=(Mount(wrote, "/b"),))) == Fault.OWN
    )


def job(*nodes: str, user: str = "ann", requeue: bool = True) -> JobRecord:
    return builders.job("j", JobState.STARTING, user=user, spec=spec(requeue=requeue), unlaunched_on=nodes)


def failed(name: str = "j", user: str = "ann", image: str = "i", **more: Any) -> FailedLaunch:
    return FailedLaunch(job=name, user=user, image=image, **more)


BOB = {n: (failed("b", "bob"),) for n in ("n0", "n1", "n2")}


@pytest.mark.parametrize(
    ("fault", "before", "failures", "jobs"),
    [
        (Fault.JOB, (), {}, True),
        (Fault.OWN, (), {}, False),
        (Fault.OWN, ("n1",), {}, True),
        (Fault.OWN, ("n0",), {}, True),  # it may not go elsewhere
        (Fault.OWN, ("n1",), BOB, False),
        (Fault.NODE, ("n1",), {}, False),
        (Fault.NODE, ("n1", "n2"), {}, True),
        (Fault.NODE, ("n0", "n0", "n0"), {}, False),
        (Fault.NODE, ("n1", "n2"), BOB, False),
        (Fault.REGISTRY, ("n1", "n2", "n0"), {}, False),
    ],
)
def test_a_job_that_fails_on_several_nodes_is_at_fault(
    fault: Fault, before: tuple[str, ...], failures: Failures, jobs: bool
) -> None:
    assert is_jobs_fault(fault, job(*before), "n0", failures) is jobs


def test_a_job_without_requeue_fails_at_once_only_by_its_own_fault() -> None:
    assert is_jobs_fault(Fault.OWN, job(requeue=False), "n0", {})
    assert not is_jobs_fault(Fault.NODE, job(requeue=False), "n0", {})


@pytest.mark.parametrize(
    ("failures", "spare", "suspicious"),
    [
        ([failed("a"), failed("b"), failed("c", "bob")], False, True),
        ([failed("a"), failed("b"), failed("c", image="other")], True, False),  # three bad images
        ([failed("a"), failed("b"), failed("c", image="other")], False, False),
        ([failed("a"), failed("b"), failed("c")], True, False),  # one bad image
        ([failed("a"), failed("b"), failed("c", verdict="node")], True, True),
        ([failed("a", verdict="node"), failed("b", verdict="node")], False, True),
        ([failed("a"), failed("a"), failed("a", "bob")], True, False),  # one job
        ([failed("a"), failed("b", "bob")], True, False),
        ([failed("a", verdict="job"), failed("b"), failed("c", "bob")], True, False),
        ([failed(name, own=True, verdict="node") for name in "abcde"], True, False),
        ([failed(name, name, own=True, verdict="node") for name in "abcde"], True, False),
        ([failed("a"), failed("b", own=True), failed("c", "bob")], True, False),
        ([failed("a"), failed("b", own=True), failed("c", "bob"), failed("d")], True, True),
    ],
)
def test_when_a_node_is_at_fault(failures: list[FailedLaunch], spare: bool, suspicious: bool) -> None:
    assert is_suspicious(tuple(failures), spare) is suspicious


def declared() -> tuple[Inventory, dict[str, NodeRecord]]:
    nodes = inventory()
    return nodes, {n.name: NodeRecord(name=n.name) for n in nodes.nodes}


class Site:
    """Nodes, and launches on them, one after the other."""

    def __init__(self) -> None:
        self.inventory, self.records = declared()
        self.events: list[str] = []

    def launch(self, node: str, what: FailedLaunch, works: bool) -> None:
        known = {n: r.failed_launches for n, r in self.records.items()}
        after = (with_success if works else with_failure)(known, node, what)
        changed, events = judge_nodes(self.inventory, self.records, after, 0.0, "why")
        self.records.update(changed)
        self.events += [f"{e.kind} {e.node}" for e in events]

    @property
    def suspended(self) -> set[str]:
        return {n for n, r in self.records.items() if r.drain_reason is not None}


def test_a_black_hole_is_suspended_and_says_how_to_put_it_back() -> None:
    site = Site()
    for name, user in (("a", "ann"), ("b", "bob"), ("c", "eve")):
        site.launch("n0", failed(name, user), works=False)
    assert site.suspended == {"n0"}
    record = site.records["n0"]
    assert record.drained_by == "gpusched"
    assert "3 launches of 3 jobs of 3 users failed here; why" in str(record.drain_reason)
    assert "gpusched resume n0" in str(record.drain_reason)
    assert site.events == ["drained n0"]


def test_one_user_with_one_image_suspends_a_node_once_his_jobs_ran_elsewhere() -> None:
    site = Site()
    for name in "abc":
        site.launch("n0", failed(name), works=False)
    assert not site.suspended
    site.launch("n1", failed("a"), works=True)
    assert site.suspended == {"n0"}


def test_a_node_suspended_for_jobs_that_fail_elsewhere_too_is_put_back() -> None:
    site = Site()
    for name, user in (("a", "ann"), ("b", "bob"), ("c", "eve")):
        site.launch("n0", failed(name, user), works=False)
    site.launch("n1", failed("a", "ann"), works=False)
    assert site.events == ["drained n0", "resumed n0"]
    assert not site.suspended


def test_a_job_without_gpus_says_nothing_about_those_with() -> None:
    site = Site()
    site.launch("n0", failed("a"), works=False)
    site.launch("n0", failed("b", "bob", gpus=False), works=False)
    site.launch("n0", failed("c", "eve", gpus=False), works=True)
    assert [f.job for f in site.records["n0"].failed_launches] == ["a"]
    site.launch("n0", failed("d"), works=True)
    assert site.records["n0"].failed_launches == ()


def test_a_manual_drain_is_not_overruled() -> None:
    site = Site()
    site.records["n0"] = NodeRecord(name="n0", drain_reason="fan", drained_by="root")
    for name, user in (("a", "ann"), ("b", "bob"), ("c", "eve")):
        site.launch("n0", failed(name, user), works=False)
    site.launch("n1", failed("a", "ann"), works=False)
    assert (site.records["n0"].drain_reason, site.events) == ("fan", [])


NODES = st.sampled_from(["n0", "n1", "n2"])


@given(st.lists(st.tuples(NODES, st.sampled_from("abcdef"), st.sampled_from("uvw"), st.booleans()), max_size=40))
def test_what_jobs_name_themselves_never_suspends_a_node(launches: list[tuple[str, str, str, bool]]) -> None:
    site = Site()
    for node, name, user, works in launches:
        site.launch(node, failed(name, user, own=not works), works=works)
        assert not site.suspended


def test_a_mistyped_folder_does_not_clear_a_node_of_what_else_failed_there() -> None:
    failures = with_failure({"n0": (failed("a"), failed("b"))}, "n1", failed("c", own=True))
    assert [f.verdict for f in (*failures["n0"], *failures["n1"])] == ["", "", ""]


@given(st.lists(st.tuples(NODES, st.sampled_from("abcdef")), max_size=40))
def test_one_users_bad_image_never_suspends_a_node(launches: list[tuple[str, str]]) -> None:
    site = Site()
    for node, name in launches:
        site.launch(node, failed(name), works=False)
        assert not site.suspended


@given(st.lists(st.tuples(NODES, st.sampled_from("abcdef"), st.sampled_from("xyz")), max_size=40))
def test_one_user_never_suspends_every_node(launches: list[tuple[str, str, str]]) -> None:
    site = Site()
    for node, name, image in launches:
        site.launch(node, failed(name, image=name + image), works=False)
        assert len(site.suspended) < 3


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("uvw"), NODES), max_size=60), st.data())
def test_a_broken_node_does_not_eat_the_queue_and_takes_no_other_with_it(
    launches: list[tuple[str, str, str]], data: st.DataObject
) -> None:
    """n0 fails everything, the others nothing; each job that failed is tried elsewhere."""
    site, users = Site(), {name: data.draw(st.sampled_from("uvw")) for name in "abcdefgh"}
    eaten = 0
    for name, _, node in launches:
        if node == "n0" and "n0" in site.suspended:
            node = "n1"
        one = failed(name, users[name])
        site.launch(node, one, works=node != "n0")
        if node == "n0":
            eaten += 1
            assert not is_jobs_fault(Fault.NODE, job("n0", user=users[name]), "n0", {})
            site.launch("n2", one, works=True)
    assert site.suspended <= {"n0"}
    assert eaten <= 16, "at most each job twice before two have proved it"


def test_own_failures_and_nodes_are_counted_exactly() -> None:
    for before, jobs in (((), False), (("n1",), False), (("n1", "n2"), True), (("a", "b", "c"), True)):
        assert is_jobs_fault(Fault.NODE, job(*before), "n0", {}) is jobs
    own = {"n0": (failed("b", "ann", "i"),), "n1": (failed("b", "bob", verdict="job"),)}
    assert is_jobs_fault(Fault.OWN, job("n1"), "n0", own), "the user's own image, and what is the other job's fault"
    image = {"n1": (failed("b", "ann", "other"),)}
    assert not is_jobs_fault(Fault.OWN, job("n1"), "n0", image)


def test_a_success_clears_its_node_and_says_whose_fault_the_like_was() -> None:
    a, b = failed("a"), failed("b", "bob", "other")
    known = {"n0": (a, b), "n1": (failed("a"), failed("c", verdict="job"), failed("d", "eve", verdict="job"))}
    after = with_success(known, "n0", a)
    assert after["n0"] == ()
    assert [f.verdict for f in after["n1"]] == ["node", "", "job"]
    assert with_success({}, "n5", a) == {"n5": ()}
    cpu = failed("x", gpus=False)
    assert with_success({"n0": (a, cpu)}, "n0", cpu)["n0"] == (a,)
    assert known["n0"] == (a, b)


def test_equal_failures_elsewhere_are_the_jobs_unless_the_node_is_proved_bad() -> None:
    proved = failed("a", "ann", verdict="node")
    known = {"n0": (proved, failed("b", "bob", "z"))}
    after = with_failure(known, "n1", failed("c"))
    assert [f.verdict for f in after["n0"]] == ["node", ""]
    assert [f.verdict for f in after["n1"]] == ["job"]
    here = with_failure(known, "n0", failed("c"))
    assert [f.verdict for f in here["n0"]] == ["node", "", ""], "on one node alone nothing is proved"


def test_the_last_node_of_a_partition_is_not_taken_by_one_user() -> None:
    site = Site()
    for other in ("n1", "n2"):
        site.records[other] = NodeRecord(name=other, drain_reason="fan", drained_by="root")
    for name in "abc":
        site.launch("n0", failed(name, image=name), works=False)
    assert site.records["n0"].drain_reason is None
    site.records["n2"] = NodeRecord(name="n2")
    site.launch("n0", failed("d", image="d"), works=False)
    assert site.records["n0"].drain_reason is None, "no other user's, and none has run elsewhere"
    site.launch("n2", failed("a", image="a"), works=True)
    assert "4 launches of 4 jobs failed here; why" in str(site.records["n0"].drain_reason)


def test_failures_are_judged_on_every_node_they_are_known_of() -> None:
    site = Site()
    after = {"n1": tuple(failed(name, user) for name, user in (("a", "ann"), ("b", "bob"), ("c", "eve")))}
    changed, events = judge_nodes(site.inventory, site.records, after, 0.0, "why")
    assert list(changed) == ["n1"], "the node before it has none"
    assert [event.node for event in events] == ["n1"]
