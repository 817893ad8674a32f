"""How often Slurm is asked, by what it says that our questions cost it."""

import pytest

from gpusched.controller.slurm.reading import LOAD_SHARE, MAX_REST_S, SlurmReader
from gpusched.slurm.commands import NoAnswer, Slurm
from tests.slurm.beside import Beside
from tests.slurm.conftest import SlurmCluster
from tests.testbed.slurm import SlurmSite


class Priced(Slurm):
    """Real Slurm, whose figures of its own work are those of the test."""

    costs: tuple[int, float] = (0, 0.0)

    def rpc_costs(self) -> dict[str, tuple[int, float]]:
        return {"REQUEST_JOB_INFO": self.costs}


@pytest.fixture
def slurm(slurm_session: SlurmSite, monkeypatch: pytest.MonkeyPatch) -> Priced:
    slurm_session.ready()
    monkeypatch.setenv("SLURM_CONF", slurm_session.env["SLURM_CONF"])
    return Priced()


def test_slurm_says_what_its_work_was(slurm: Priced) -> None:
    before = Slurm().rpc_costs().get("REQUEST_JOB_INFO", (0, 0.0))
    slurm.jobs()
    after = Slurm().rpc_costs()["REQUEST_JOB_INFO"]
    assert after[0] == before[0] + 2
    assert before[1] < after[1] < before[1] + 5


def test_reading_takes_its_share_of_slurmctld_at_the_most(slurm: Priced) -> None:
    reader = SlurmReader(slurm)
    assert reader.is_due(1000.0)
    slurm.costs = (100, 2.0)
    reader.read(1000.0, site_factors=False)
    rest = 2 * 0.02 / LOAD_SHARE
    assert not reader.is_due(1000.0 + rest - 0.01)
    assert reader.is_due(1000.0 + rest)
    assert reader.is_due(900.0)  # the clock was set back
    slurm.costs = (110, 2.0 + 10 * 0.06)  # the queue has grown since: what came before does not count
    reader.read(1100.0, site_factors=False)
    rest = 2 * 0.06 / LOAD_SHARE
    assert not reader.is_due(1100.0 + rest - 0.01)
    assert reader.is_due(1100.0 + rest)
    slurm.costs = (3, 9.0)  # slurmctld began anew, and is far too busy
    reader.read(1200.0, site_factors=False)
    assert not reader.is_due(1200.0 + MAX_REST_S - 0.01)
    assert reader.is_due(1200.0 + MAX_REST_S)


def test_the_time_in_which_slurm_was_silent_is_no_work_of_its(slurm: Priced, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SlurmReader(slurm)
    slurm.costs = (100, 2.0)
    reader.read(1000.0, site_factors=False)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        with pytest.raises(NoAnswer):
            reader.read(1010.0, site_factors=False)
    slurm.costs = (102, 22.0)  # two questions that it took up when it was frozen
    reader.read(1100.0, site_factors=False)
    assert reader.is_due(1100.0 + 2 * 0.02 / LOAD_SHARE), "as before"
    slurm.costs = (112, 22.5)
    reader.read(1200.0, site_factors=False)
    assert not reader.is_due(1200.0 + 2 * 0.05 / LOAD_SHARE - 0.01)


def test_a_cycle_that_comes_too_early_asks_nothing_but_where_a_mode_has_changed(
    slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm_cluster.site.env["SLURM_CONF"])
    beside, looks = Beside(slurm_cluster), []
    ask = beside.slurm.jobs
    monkeypatch.setattr(beside.slurm, "jobs", lambda *given: looks.append(given) or ask(*given))
    beside.run()
    assert len(looks) == 1
    job = slurm_cluster.site.sbatch("sleep 1000")
    beside.cycle._reader._rest_s = 1000.0
    beside.cycle.run(3.0)
    assert len(looks) == 1
    assert beside.store.job(str(job)) is None
    beside.promote("advise")
    beside.cycle.run(3.0)
    assert len(looks) == 2
    assert beside.store.job(str(job)) is not None
    beside.store.close()
