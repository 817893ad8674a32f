"""A node refuses what an earlier term sends, on real nodes: no moment lets an old controller's script through."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpusched.cluster.base import Operation
from gpusched.cluster.ssh import SshCluster
from gpusched.model.resources import Inventory, Node, Partition, RuntimeName, Settings
from gpusched.nodes.fencing import FencedTransport, FencingUnavailable, TermRefused
from gpusched.nodes.local import LocalTransport
from gpusched.nodes.runtimes.base import LaunchRequest
from gpusched.nodes.runtimes.shell import script
from gpusched.nodes.transport import Transport, TransportError
from gpusched.queue.store import RankRecord
from tests.nodes.nodes import declare, opened, settings_for
from tests.testbed import Testbed, wait_until


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Transport:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return LocalTransport("here")


def fenced(transport: Transport, term: int) -> FencedTransport:
    return FencedTransport(transport, "c", "n", term)


def kept(folder: Path) -> Path:
    return folder / "state/gpusched-node/c/n/term"


def read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def test_a_script_runs_as_without_a_fence_until_a_higher_term_was_seen(here: Transport, tmp_path: Path) -> None:
    old, new = fenced(here, 5), fenced(here, 6)
    result = old.run(script("echo out; echo err >&2; umask; exit 17\n"), 10)
    bare = here.run(script("echo out; echo err >&2; umask; exit 17\n"), 10)
    assert result == bare
    assert kept(tmp_path).read_text() == "5\n"
    assert new.run(script("cat\nsaid\n"), 10).exit_code == 127  # stdin is the script's
    with pytest.raises(TermRefused) as refused:
        old.run(script(f"touch {tmp_path}/done\n"), 10)
    assert refused.value.term == 6
    with pytest.raises(TermRefused):
        old.claim(10)
    assert not (tmp_path / "done").exists()
    fenced(here, 1795712424).claim(10)
    assert kept(tmp_path).read_text() == "1795712424\n"
    assert kept(tmp_path).stat().st_mode & 0o777 == 0o600


def test_a_higher_term_waits_for_the_scripts_of_a_lower_one(here: Transport, tmp_path: Path) -> None:
    """Each writes its line while no other does; what a script detaches does not count."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    text = f"touch {begun}\nuntil [ -e {go} ]; do sleep 0.02; done\necho old >>{tmp_path}/said\n"
    text += f"setsid sh -c 'until [ -e {tmp_path}/end ]; do sleep 0.05; done' >/dev/null 2>&1 </dev/null &\n"
    first = threading.Thread(target=fenced(here, 5).run, args=(script(text), 60))
    first.start()
    wait_until(begun.exists)
    with pytest.raises(TransportError, match="previous controller still runs"):
        FencedTransport(here, "c", "n", 7, patience_s=1).claim(60)
    then = threading.Thread(target=fenced(here, 6).run, args=(script(f"echo new >>{tmp_path}/said\n"), 60))
    then.start()
    wait_until(lambda: any(b"flock\0-x\0" in read(path) for path in Path("/proc").glob("[0-9]*/cmdline")))
    go.touch()
    first.join()
    then.join()
    (tmp_path / "end").touch()
    assert (tmp_path / "said").read_text() == "old\nnew\n"


def test_a_term_that_cannot_be_stored_is_an_error_and_nothing_runs(here: Transport, tmp_path: Path) -> None:
    fenced(here, 5).claim(600)
    kept(tmp_path).write_text("5x\n")
    with pytest.raises(FencingUnavailable, match="term is damaged; remove it"):
        fenced(here, 6).run(script(f"touch {tmp_path}/done\n"), 600)
    kept(tmp_path).unlink()
    os.mknod(kept(tmp_path), stat.S_IFSOCK | 0o600)  # as of a damaged disk: it is there, and cannot be opened
    with pytest.raises(FencingUnavailable, match="term is damaged; remove it"):
        fenced(here, 6).run(script(f"touch {tmp_path}/done\n"), 600)
    (tmp_path / "state").rename(tmp_path / "elsewhere")
    (tmp_path / "state").touch()
    with pytest.raises(FencingUnavailable, match="cannot write to"):
        fenced(here, 6).run(script(f"touch {tmp_path}/done\n"), 600)
    assert not (tmp_path / "done").exists()


def test_commands_of_the_seen_term_run_on_a_read_only_disk(
    here: Transport, tmp_path: Path
) -> None:
    """Jobs there can still be killed. A folder, too, can be read and not written, by any user."""
    fenced(here, 5).claim(600)
    lock = kept(tmp_path).with_name("term.lock")
    lock.unlink()
    lock.mkdir()
    result = fenced(here, 5).run(script("echo killed\n"), 600)
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"killed\n", b"")
    with pytest.raises(TermRefused):
        fenced(here, 4).run(script(f"touch {tmp_path}/done\n"), 600)


def test_a_launch_without_flock_fails_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sh", "mkdir", "cat"):
        (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    node = Node(
        name="here", partition="p", address="", transport="local", gpus=0, cores=1, memory_mib=1,
        runtime=RuntimeName.PROCESS,
    )  # fmt: skip
    partition = Partition(name="p", nodes=(node,), flavors=())
    inventory = Inventory(path="", settings=Settings(), partitions=(partition,))
    rank = RankRecord(job_id="j", attempt=1, rank=0, node="here", runtime="process")
    request = LaunchRequest(
        name="x", cluster_id="c", node="here", job_id="j", attempt=1, rank=0, command=("true",), cores=1, memory_mib=1
    )
    with contextlib.closing(SshCluster(inventory, "c", tmp_path, term=5)) as cluster:
        for verb, transient in (("launch", False), ("forget", True)):
            cluster.perform([Operation(verb=verb, node="here", rank=rank, request=request)])
            cluster.wait_for_operations(60)
            (found,) = cluster.finished()
            assert (found.error, found.transient) == ("here: flock (util-linux) is missing on this node", transient)


def test_a_controller_that_was_cut_off_changes_nothing_on_the_nodes(testbed: Testbed, tmp_path: Path) -> None:
    """Both controllers are alive and reach the node; the store is not asked."""
    node = declare(testbed, testbed.nodes[0])
    partition = Partition(name="p", nodes=(node,), flavors=())
    inventory = Inventory(path="", settings=settings_for(testbed), partitions=(partition,))
    refused = list[TermRefused]()
    old, new = (
        SshCluster(inventory, "fenced", tmp_path, term=term, on_refused=refused.append) for term in (5, 6)
    )
    rank = RankRecord(job_id="j", attempt=1, rank=0, node=node.name, runtime="process")
    forget = Operation(verb="forget", node=node.name, rank=rank)
    folder = "$HOME/.local/state/gpusched-node/fenced/" + node.name

    def outcome(cluster: SshCluster, operation: Operation) -> str:
        cluster.perform([operation])
        cluster.wait_for_operations(60)
        (found,) = cluster.finished()
        return found.error

    try:
        old.observe([node], 60)
        with opened(node, inventory.settings) as transport:
            transport.run(script(f"mkdir -p {folder}/jobs/j {folder}/jobs/k\n"), 30)
            assert outcome(old, forget) == ""
            new.observe([node], 60)  # its first probe
            others = replace(forget, rank=replace(rank, job_id="k"))
            assert "took over (term 6)" in outcome(old, others)
            assert [error.term for error in refused] == [6]
            assert transport.run(script(f"ls {folder}/jobs\n"), 30).stdout == b"k\n"
            assert outcome(new, others) == ""
    finally:
        for cluster in (old, new):
            cluster.close()
        testbed.nodes[0].run(["/bin/sh", "-c", f"rm -rf {folder}"], check=False)
