"""Beside a Slurm with 10,000 waiting jobs: what a look costs us, and slurmctld, and how soon a decided job runs."""

import contextlib
import resource
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.slurm import Watch, cpu_s, fill, installed, of, starts
from gpusched.controller.predicting import compile_for
from gpusched.model.policy import PolicySpec
from gpusched.sched.warming import small_snapshot
from gpusched.slurm.commands import Slurm
from tests.testbed.slurm import SlurmSite


def our_cpu_s() -> float:
    """CPU seconds of this process, and of Slurm's commands that it ran."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def test_ten_thousand_waiting_jobs(
    slurm_site: SlurmSite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    compile_for(small_snapshot(PolicySpec(name="warm-up")))  # else a process that compiles would count as ours
    monkeypatch.setenv("SLURM_CONF", slurm_site.env["SLURM_CONF"])
    monkeypatch.setenv("GPUSCHED_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(tmp_path / "inventory.yaml"))
    fill(slurm_site, 10_000)
    slurm, looks = Slurm(), 10
    waiting = [job.id for job in slurm.jobs() if job.state == "PENDING"]
    assert len(waiting) == 10_000
    costs, own_before = [cpu_s(slurm_site.slurmctld)], our_cpu_s()
    for _ in range(looks):
        slurm.jobs()
        costs.append(cpu_s(slurm_site.slurmctld))
    reading_s = (our_cpu_s() - own_before) / looks
    look_s = min(after - before for before, after in pairwise(costs))  # in the others it did more for itself
    with contextlib.closing(installed(slurm_site, tmp_path)) as service:
        service.run(5.0)
        rest_s = of(service)._reader._rest_s
        assert look_s <= 0.03 * rest_s, "2 %, and what slurmctld does for others in the meantime"
        slurm.update([f"update JobId={job} TimeLimit=60" for job in waiting[:200]])
        of(service)._reader._rest_s = 0.0
        deciding, read = Watch(of(service), "_decide"), Watch(of(service), "_read_slurm")
        before, decided_before = our_cpu_s(), deciding.cpu
        service.run(5.0)
        observing_s = our_cpu_s() - before - (deciding.cpu - decided_before)
        assert read.took > 0
        assert observing_s <= 3 * reading_s, "0.4 s on a quiet machine: little more than one reading of the queue"
        assert sum(job.spec.time_limit_s == 3600 for job in service.store.pending()) == 200
        found = starts(slurm_site, service, 1, patience_s=900)
    assert found["jobs"] >= 8
    assert found["median_s"] <= 600, "1 to 2 s on a quiet machine"
    figure = f"10,000 jobs wait: observing {observing_s:.2f} s of CPU, slurmctld {look_s:.3f} s each {rest_s:.1f} s"
    record_property("figure", f"{figure}; from decision to running {found['median_s']} s, at most {found['most_s']} s")
