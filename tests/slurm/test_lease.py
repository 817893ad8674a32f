"""Requests to Slurm: no text of a user gets into a line, and real Slurm takes the lines as they are meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.slurm import lease
from gpusched.slurm.commands import Slurm
from gpusched.slurm.lease import PendingSlurmJob, fifo_priorities, priority_additions
from tests.slurm.leasing import leases
from tests.testbed.slurm import SlurmSite
from tests.testbed.waiting import wait_until

HOSTILE = [
    "", " ", "1 Priority=9", "1\nrequeue 2", "1\x1f", "1;2", "-1", "1_", "1_2_3", "all", "1,2", "١", "1\n", "1+",
    "1_[0-9]", "Name=x",
]  # fmt: skip
ABOUT_JOBS: list[Callable[[str], str]] = [
    lease.admit, lease.requeue, lease.begin_now, lambda job: lease.start(job, ["n1"]),
    lambda job: lease.withdraw(job, []), lambda job: lease.site_factor(job, 1), lambda job: lease.priority(job, 1),
]  # fmt: skip
ABOUT_NODES: list[Callable[[list[str]], str]] = [
    lambda nodes: lease.start("1", nodes), lambda nodes: lease.withdraw("1", nodes), lease.create, lease.renew,
]  # fmt: skip


@pytest.mark.parametrize("line", ABOUT_JOBS)
@pytest.mark.parametrize("text", HOSTILE)
def test_an_invalid_job_id_gets_into_no_command(line: Callable[[str], str], text: str) -> None:
    with pytest.raises(ValueError, match="no id of a job"):
        line(text)


@pytest.mark.parametrize("line", ABOUT_NODES)
@pytest.mark.parametrize("node", ["", "n 1", "n1,n2", "n[1-2]", "n1\nrequeue 2", "n=1", "-n", "ALL\x1f", "n1\n"])
def test_an_invalid_node_gets_into_no_command(line: Callable[[list[str]], str], node: str) -> None:
    with pytest.raises(ValueError, match="no name of a node"):
        line(["n1", node])


@given(text=st.text())
def test_a_line_is_a_line(text: str) -> None:
    try:
        line = lease.start(text, [text])
    except ValueError:
        return
    assert line == f"update JobId={text} ReservationName=gpusched ReqNodeList={text}"
    assert line.isprintable()
    assert len(line.split(" ")) == 4


@given(
    queue=st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 4)), max_size=12),
    first=st.lists(st.integers(0, 14), max_size=8),
)
def test_the_wanted_jobs_go_first_and_no_update_is_sent_twice(queue: list[tuple[int, int]], first: list[int]) -> None:
    jobs = [PendingSlurmJob(str(i), max(1, base + added), base, added) for i, (base, added) in enumerate(queue)]
    names = [str(i) for i in first]
    added = priority_additions(jobs, names)
    after = [
        j._replace(priority=max(1, j.base + more), added=more) for j in jobs for more in [added.get(j.id, j.added)]
    ]
    order = [job.id for job in sorted(after, key=lambda job: job.sort_key(job.priority), reverse=True)]
    wanted = [name for name in dict.fromkeys(names) if int(name) < len(queue)]
    assert order[: len(wanted)] == wanted
    rest = [job for job in jobs if job.id not in wanted]
    assert order[len(wanted) :] == [
        job.id for job in sorted(rest, key=lambda job: job.sort_key(job.base), reverse=True)
    ], "the others as without us"
    assert priority_additions(after, names) == {}
    assert all(more >= 0 for more in added.values())


@given(queue=st.dictionaries(st.integers(1, 30), st.integers(50, 90), max_size=10), data=st.data())
def test_under_priority_basic_jobs_go_back_to_where_they_came_in(queue: dict[int, int], data: st.DataObject) -> None:
    ids = sorted(queue)
    found = {str(job): 1000 - job for job in ids}  # as Slurm gives them
    changed = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    found |= {str(job): 2000 + queue[job] for job in changed}
    base = fifo_priorities(found, {str(job) for job in changed})
    assert base.keys() == {str(job) for job in changed}
    after = [PendingSlurmJob(job, value, value) for job, value in (found | base).items()]
    assert [int(j.id) for j in sorted(after, key=lambda j: j.sort_key(j.priority), reverse=True)] == ids


@pytest.mark.parametrize("enforced", ["", "associations"])
def test_every_users_job_can_be_put_into_the_lease(
    slurm_site: SlurmSite, monkeypatch: pytest.MonkeyPatch, enforced: str
) -> None:
    site = slurm_site
    site.configure(AccountingStorageEnforce=enforced)
    monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
    slurm = Slurm()
    create = lease.create(["dgx001", "dgx003"], enforced=lease.enforces_associations(slurm.config()))
    assert slurm.update([lease.renew()]).keys() == {0}, "there is none"
    assert slurm.update([create]) == {}
    assert slurm.update([create]).keys() == {0}, "there is one"
    jobs = [str(site.sbatch("sleep 1000", "--gpus-per-node=8", user=user)) for user in ("games", "root")]
    assert slurm.update([lease.start(jobs[0], ["dgx003"]), lease.start(jobs[1], ["dgx001"])]) == {}
    for job in jobs:
        site.wait(job, "RUNNING")
    assert slurm.update([lease.withdraw(jobs[0], [])]).keys() == {0}, "it runs: nothing is taken back"
    assert slurm.update([lease.renew(["dgx001"])]) == {}
    assert "Nodes=dgx001 " in leases(site)
    assert slurm.update([lease.end()]) == {}, "also right after a renewal"
    wait_until(lambda: "State=ACTIVE" not in leases(site), 10, "its end")
    if "ReservationName" in leases(site):  # it lingers while its jobs run
        assert slurm.update([lease.renew(["dgx001", "dgx003"])]) == {}
        assert "State=ACTIVE" in leases(site)
    assert [site.state(job) for job in jobs] == ["RUNNING", "RUNNING"]


def test_a_users_own_nodes_survive_a_withdrawal(slurm_site: SlurmSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm_site.env["SLURM_CONF"])
    slurm = Slurm()
    job = str(slurm_site.sbatch("sleep 1", "--hold", "-w", "dgx003"))
    enforced = lease.enforces_associations(slurm.config())
    assert slurm.update([lease.create(["dgx001", "dgx003"], enforced=enforced), lease.start(job, ["dgx003"])]) == {}
    assert slurm.update([lease.withdraw(job, ["dgx003"])]) == {}
    (found,) = [j for j in slurm.jobs() if j.id == job]
    assert (found.reservation, found.req_nodes) == ("", ("dgx003",))
    assert slurm.update([lease.start(job, ["dgx001"]), lease.start("999999", ["dgx001"])]).keys() == {1}
    assert slurm.update([lease.withdraw(job, [])]) == {}
    (found,) = [j for j in slurm.jobs() if j.id == job]
    assert (found.reservation, found.req_nodes) == ("", ())
