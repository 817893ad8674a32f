"""Fixtures for all tests. `testbed` is a cluster of four real sshd nodes; see tests/testbed."""

import gc
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from gpusched import compiled
from tests.testbed import Testbed, slurm_files, why_unavailable
from tests.testbed.slurm import SlurmSite

compiled.BRIEFLY_S = 3.0  # tests have many small worlds, each of which would be compiled for ten seconds
gc.disable()  # until tests run: nothing that imports make is garbage
# Many tests have a cache folder of their own. Nothing is compiled in there yet, which would take half a minute.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
# What happens is logged as by a controller; pytest shows the log of a test that failed.
logging.getLogger("gpusched").setLevel(logging.INFO)
# The caller may ignore these (nohup, `&`), and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("NUMBA_CACHE_DIR", str(_CACHE / "gpusched" / "numba"))
os.environ.setdefault("DASK_CONFIG", str(_CACHE / "gpusched" / "dask"))  # where dask-jobqueue writes an example

# The same examples each time: a normal run does not search for new ones. To search:
# ARGS="--hypothesis-profile=default --hypothesis-seed=1"
_slow = (HealthCheck.too_slow,)  # the first draw may compile, on a busy machine
settings.register_profile(
    "same", derandomize=True, database=None, deadline=None, print_blob=True, suppress_health_check=_slow
)
settings.load_profile("same")

LONGEST = (
    "docs/test_guides.py", "sim/test_sharing.py", "e2e/test_resizing.py", "sim/test_quotas.py",
    "sim/test_own_requests.py", "sim/test_links_live.py", "sim/test_snapshot_sizes.py",
    "e2e/test_failures_nodes.py", "agents/test_gate.py", "e2e/test_snakemake.py", "sim/test_pairs.py",
    "e2e/test_hot.py", "sim/test_sized_costs.py", "e2e/test_preempting.py", "sim/test_engine.py",
    "slurm/test_faults.py", "sim/test_ahead.py", "e2e/test_gpus.py", "sim/test_slices.py",
    "e2e/test_gist_episodes.py", "sim/test_links_walk.py", "e2e/test_slices.py", "sim/test_rates_reference.py",
    "nodes/runtimes/test_confinement.py", "promotion/test_topology.py", "e2e/test_shells.py",
    "agents/test_maifs.py", "e2e/test_failures_controller.py", "agents/test_topology_train.py",
    "slurm/test_replay.py", "sim/test_orders_reference.py", "slurm/test_scale.py", "agents/test_topology.py",
    "e2e/test_idle.py", "agents/test_dl2_agent.py", "e2e/test_agents.py", "sim/test_reserved.py",
    "e2e/test_plugins.py", "agents/test_topology_gradient.py", "e2e/test_failures_engine.py",
    "sched/test_compiled.py", "slurm/test_cycle.py", "agents/test_dqn.py", "e2e/test_recover.py",
    "sched/test_agents_topology.py", "e2e/test_site.py", "sched/test_slice_plans.py", "plugin/test_plugin.py",
    "sched/test_contention.py", "e2e/test_racks.py", "sched/test_attention.py", "controller/test_sharing.py",
    "agents/test_rltune.py", "controller/test_crash_orders.py", "sim/test_learned_links.py",
    "e2e/test_live_vs_simulated.py", "agents/test_maifs_gradient.py", "controller/test_clock.py",
    "agents/test_train_cli.py", "nodes/test_steps.py", "sched/test_properties.py", "campaign/test_campaign.py",
    "sched/test_racks.py", "e2e/test_integrations.py", "sched/mapping/test_rltune.py",
    "controller/test_preempting.py", "sched/mapping/test_heterogeneous.py", "controller/test_crash_points.py",
    "promotion/test_night.py", "e2e/test_torchx.py", "sched/test_asking.py", "e2e/test_health_checks.py",
    "agents/test_elastic_example.py", "nodes/runtimes/test_engines.py", "sched/test_agents_rltune_preempt.py",
    "e2e/test_progress.py", "sched/test_agents_gist.py",
)  # fmt: skip
"""Files that take longest, in seconds or in waiting, by turns: those that wait for nodes and those that compute."""

COMPUTED = ("accounting", "agents", "config", "fuzz", "sched", "sim", "study", "traces", "views")
"""Rooms without daemons: what fails there is wrong, and passing the second time would hide a race (decision 0077)."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whatever uses the testbed carries its marker: `pytest -m "not testbed"` leaves it out.

    The longest files come first, so that no process is left with one of them when the others have ended.
    """
    if config.getoption("reruns", None):
        for item in items:
            if item.path.relative_to(Path(__file__).parent).parts[0] in COMPUTED:
                item.add_marker(pytest.mark.flaky(reruns=0))
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if "testbed_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.testbed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Have what was collected never looked through for garbage again: each of six processes holds a million objects."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _no_watcher_is_left() -> Iterator[None]:
    """Threads that would wait for a module's jobs for ever hold SQLite's locks now and then, as others fork."""
    yield
    for thread in threading.enumerate():
        if thread.name == "gpusched-jobs" and (watcher := getattr(getattr(thread, "_target", None), "__self__", None)):
            with watcher._lock:
                watcher._new.clear()
                watcher._waiting.clear()
                watcher._lock.notify()
            thread.join(60)


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run compiled functions as Python in tests marked `interpreted`, but for those marked `compiled`.

    For each set of features that a world has the engine would be compiled anew, which takes far longer than to run it.
    Python also checks indices, which compiled code does not. COMPILED=1 compiles everywhere. Where neither is marked,
    short replays and forecasts are compiled only if that is done already, as everywhere.
    """
    marked = request.node.get_closest_marker
    if marked("compiled") is not None or os.environ.get("COMPILED"):
        monkeypatch.setenv("GPUSCHED_COMPILED", os.environ.get("GPUSCHED_COMPILED", "always"))
        yield
        return
    if marked("interpreted") is None:
        yield
        return
    with compiled.interpreted(math.inf):
        monkeypatch.setattr(compiled._Mode, "until", math.inf)  # of threads that the test starts
        yield


WITHOUT_TORCH = ""
_SIGNS = ("training needs torch, which is not installed", "No module named 'torch'")
if find_spec("torch") is None:  # `make test` fetches no CUDA (decision 0045); tests that need torch are skipped
    from gpusched.agents.common import torch_

    WITHOUT_TORCH = "needs torch, of which pip found no build without CUDA (requirements/torch.in)"
    _need = torch_.require

    def _need_or_skip(name: str) -> Any:
        if name == "torch":
            pytest.skip(WITHOUT_TORCH)
        return _need(name)

    torch_.require = _need_or_skip


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a test that failed stands what its controller said last; one that lacked torch is skipped."""
    report = yield
    if report.failed and WITHOUT_TORCH and any(sign in report.longreprtext for sign in _SIGNS):
        path, line, _ = item.location  # its own process asked for torch
        report.outcome, report.longrepr = "skipped", (path, line or 0, WITHOUT_TORCH)
    for name, value in getattr(item, "funcargs", {}).items() if report.failed and report.when == "call" else ():
        if log := getattr(value, "controller_log", ""):
            report.sections.append((f"controller of {name}", log[-6000:]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what tests record to the log, however many processes ran.

    Figures come with the test (``record_property("figure", text)``), nodes that had to be healed with its teardown.
    A test that passed at its second try stands with what it failed of.
    """
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.write_sep("_", f"RERUN {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
    for outcome, wanted in (("passed", "figure"), ("failed", "figure"), ("", "healed")):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == wanted and (outcome or report.when == "teardown"):
                    terminalreporter.write_line(f"{report.nodeid}: {value}" if name == "healed" else str(value))


@pytest.fixture(scope="session")
def testbed_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """The testbed of this session (one per xdist worker), up; nothing resets it between tests."""
    if reason := why_unavailable():
        required = os.environ.get("CI") == "true" or os.environ.get("GPUSCHED_REQUIRE_TESTBED") == "1"
        if required:
            pytest.fail(reason)
        pytest.skip(reason)
    with Testbed(tmp_path_factory.mktemp("testbed"), count=4) as testbed:
        yield testbed


@pytest.fixture
def testbed(testbed_session: Testbed, record_property: Callable[[str, object], None]) -> Iterator[Testbed]:
    """Four healthy, idle nodes, dgx001 to dgx004; put right again after the test, whatever it did to them."""
    yield testbed_session
    testbed_session.reset()
    for node in testbed_session.nodes:
        while node.healed:
            record_property("healed", node.healed.pop())


@pytest.fixture(scope="session")
def slurm_session(testbed_session: Testbed) -> Iterator[SlurmSite]:
    """Slurm on the testbed of this session, up; nothing resets it between tests."""
    if reason := slurm_files.why_unavailable():
        if os.environ.get("CI") == "true" or os.environ.get("GPUSCHED_REQUIRE_TESTBED") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    # A slurmctld that has just started looks at its queue after sched_interval: tests need not wait 5 s each.
    site = SlurmSite(
        testbed_session, settings={"SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1"}
    )
    site.up()
    yield site
    site.down()


@pytest.fixture
def slurm_site(slurm_session: SlurmSite, testbed: Testbed) -> Iterator[SlurmSite]:
    """Slurm with four idle nodes and no jobs; commands reach it with `slurm_site.env`. Put right after the test."""
    slurm_session.ready()
    yield slurm_session
    slurm_session.reset()
