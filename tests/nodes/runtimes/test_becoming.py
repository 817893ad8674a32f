"""The user of a job: by sudo where root logins are not allowed, by rootless podman, and as root only if allowed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.transport import RemoteScript
from tests.nodes.runtimes.world import IMAGE, World
from tests.testbed import Testbed, TestNode, wait_until

ACCOUNT, NOBODY = "gpuops", 65534


def world_of(testbed: Testbed, test_node: TestNode, runtime: RuntimeName, **more: str) -> World:
    node = Node(
        name=test_node.name, partition="p", address=test_node.address, port=test_node.port, user=ACCOUNT,
        key=str(testbed.identity), gpus=0, cores=1, memory_mib=512, runtime=runtime, **more,  # type: ignore[arg-type]
    )  # fmt: skip
    transport = open_transport(node, Settings(known_hosts=str(testbed.known_hosts)))
    return World(runtime, transport, test_node, test_node.name)


@pytest.fixture
def account(testbed: Testbed) -> Iterator[TestNode]:
    """A node with an unprivileged account that has a range of subordinate user ids."""
    node = testbed.nodes[3]
    keys = testbed.identity.with_suffix(".pub")
    keys.chmod(0o644)  # sshd reads them as the account
    for folder in (p for p in keys.parents if not p.stat().st_mode & 1):
        folder.chmod(folder.stat().st_mode | 1)
    node.run(["useradd", "--create-home", "--home-dir", f"/run/{ACCOUNT}", "--shell", "/bin/sh", "-p", "*", ACCOUNT])
    node.run(["sh", "-c", f"for file in subuid subgid; do echo {ACCOUNT}:200000:65536 >/etc/$file; done"])
    yield node
    clean = f"pkill -KILL -u {ACCOUNT}; rm -f /etc/sudoers.d/gpusched; userdel -r -f {ACCOUNT} 2>&-; true"
    node.run(["sh", "-c", clean])


@pytest.mark.skipif(shutil.which("sudo") is None, reason="needs sudo")
def test_a_job_is_its_submitters_where_the_account_becomes_root_by_sudo(testbed: Testbed, account: TestNode) -> None:
    account.run(["sh", "-c", f"echo '{ACCOUNT} ALL=(root) NOPASSWD: ALL' >/etc/sudoers.d/gpusched"])
    world = world_of(testbed, account, RuntimeName.PROCESS, become="sudo")
    ref = world.launch("sh", "-c", "id -u; id -G; sleep 600", run_as=(NOBODY, NOBODY), allow_root=False)
    attempt = world.await_phase(ref, "running")
    assert account.run(["stat", "-c", "%u", f"/proc/{attempt['pid']}"]).stdout == f"{NOBODY}\n"
    wait_until(lambda: world.output(ref) == f"{NOBODY}\n{NOBODY}\n", 10, "its output")
    # What is followed ends with our side, though it runs as root.
    follower = world.transport.stream(world.runtime.log(ref, follow=True))
    next(follower)
    follower.close()  # type: ignore[attr-defined]
    followers = ["pgrep", "-f", f"^sh -c name=.*{ref.name}"]
    wait_until(lambda: not account.run(followers, check=False).stdout, 20, "the end of what followed the log")
    world.clean()
    world.transport.close()


def test_the_job_of_an_account_that_is_root_is_refused(process: World) -> None:
    for who in ({}, {"run_as": (0, 0)}):
        result = process.run(process.runtime.launch(process.request("true", allow_root=False, **who)))
        assert result.exit_code == 1
        assert result.complaint == "the job would run as root, which needs settings.root_jobs in inventory.yaml"
    assert process.listed()[0] == {}
    assert process.await_phase(process.launch("true", allow_root=False, run_as=(NOBODY, NOBODY)), "exited")


def test_jobs_of_rootless_podman_have_ids_of_the_accounts_namespace(
    testbed: Testbed, account: TestNode, request: pytest.FixtureRequest
) -> None:
    # A user namespace may mount a /proc only where all of one can be seen; the testbed's boot id hides a part.
    boot_id = "/proc/sys/kernel/random/boot_id"
    account.run(["umount", boot_id])
    request.addfinalizer(lambda: account.run(["mount", "--bind", account.disk / "boot_id", boot_id]))
    world = world_of(testbed, account, RuntimeName.PODMAN)
    rootfs = account.run(["podman", "save", IMAGE, "-o", "/run/image.tar"], check=False)
    assert rootfs.returncode == 0, rootfs.stderr
    account.run(["chmod", "a+r", "/run/image.tar"])
    world.do(RemoteScript(("podman", "load", "-q", "-i", "/run/image.tar")))
    own = account.run(["id", "-u", ACCOUNT]).stdout.strip()
    for run_as, inside, outside in ((None, "0", own), ((1000, 1000), "1000", "200999")):
        ref = world.launch("sh", "-c", "id -u; sleep 600", allow_root=False, run_as=run_as)
        pid = world.await_phase(ref, "running")["pid"]
        assert account.run(["stat", "-c", "%u", f"/proc/{pid}"]).stdout.strip() in (own, outside)
        child = account.run(["pgrep", "-f", "^sleep 600"]).stdout.split()[-1]
        assert account.run(["stat", "-c", "%u", f"/proc/{child}"]).stdout == f"{outside}\n"
        wait_until(lambda ref=ref, inside=inside: world.output(ref) == f"{inside}\n", 10, "its output")  # type: ignore[misc]
        world.do(world.runtime.remove(ref))
    world.clean()
    world.transport.close()
