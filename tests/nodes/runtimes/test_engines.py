"""Features of containers only: limits, GPUs, images, users, and the engine's own ways to fail. podman and docker."""

import os
from pathlib import Path

import pytest

from gpusched.model.jobs import Mount
from gpusched.model.resources import RuntimeName
from gpusched.model.slices import MigSlice
from gpusched.nodes.runtimes import AttemptRef, runtime_for
from gpusched.nodes.transport import RemoteScript
from tests.nodes.runtimes.world import CLUSTER, IMAGE, World
from tests.testbed import wait_until


def inspect(world: World, name: str, template: str) -> str:
    return world.do(RemoteScript((str(world.name), "inspect", "--format", template, name))).strip()


def test_cores_memory_and_shared_memory_are_limited(engine: World) -> None:
    _, output = engine.finish("sh", "-c", "df -m /dev/shm | tail -n 1 | awk '{print $2}'", cores=2, memory_mib=96)
    assert output == "96\n"
    name = engine.request("true").name
    assert inspect(engine, name, "{{.HostConfig.NanoCpus}} {{.HostConfig.Memory}}") == f"2000000000 {96 << 20}"
    assert inspect(engine, name, "{{.HostConfig.NetworkMode}}") == "host"


def test_a_job_over_its_memory_is_distinguished_from_a_killed_one(engine: World) -> None:
    attempt, _ = engine.finish("sh", "-c", "exec tail /dev/zero", memory_mib=32)
    assert (attempt["phase"], attempt["exit_code"], attempt["oom_killed"]) == ("exited", 137, True)
    assert engine.listed_sh()[0] == {attempt["name"]: attempt}


def test_a_job_killed_by_hand_did_not_run_out_of_memory(engine: World) -> None:
    ref = engine.launch("sleep", "6000")
    engine.await_phase(ref, "running")
    engine.do(RemoteScript((str(engine.name), "kill", ref.name)))
    attempt = engine.await_phase(ref, "exited")
    assert (attempt["exit_code"], attempt["oom_killed"]) == (137, False)
    assert engine.listed_sh()[0] == {attempt["name"]: attempt}


def test_a_job_whose_child_ran_out_of_memory(engine: World) -> None:
    attempt, _ = engine.finish("sh", "-c", "tail /dev/zero; exit 3", memory_mib=32)
    assert (attempt["phase"], attempt["exit_code"], attempt["oom_killed"]) == ("exited", 3, True)


def supervisor(engine: World, ref: AttemptRef) -> int:
    """The process of the engine that waits for the container's end."""
    word = "conmon" if engine.name is RuntimeName.PODMAN else "containerd-shim"
    container = engine.read(ref)["id"]
    (pid,) = (p for p in engine.pids(container, part=True) if p in engine.pids(word, part=True))
    return pid


@pytest.mark.parametrize("also_init", [False, True])
def test_a_container_whose_supervisor_was_killed_comes_to_an_end(engine: World, also_init: bool) -> None:
    """podman says of it that it runs, for ever; docker's containerd ends it by itself."""
    ref = engine.launch("sh", "-c", "echo hello; setsid sleep 4249 & exec sleep 4250")
    wait_until(lambda: engine.pids("sleep 4249") and engine.output(ref) == "hello\n")
    init = engine.read(ref)["pid"]
    # docker ends the other one by itself, perhaps before it is its turn.
    engine.sh(f"kill -KILL {supervisor(engine, ref)} {f'{init} || :' if also_init else ''}")
    if engine.name is RuntimeName.DOCKER:
        engine.await_phase(ref, "exited")
        engine.do(engine.runtime.remove(ref))
        return
    if not also_init:
        assert engine.read(ref)["phase"] == "running", "its work goes on"
        engine.do(engine.runtime.signal(ref, "KILL"))
    attempt = engine.await_phase(ref, "lost")
    assert attempt["exit_code"] is None
    assert "conmon" in attempt["error"]
    assert engine.listed_sh()[0] == {ref.name: attempt}
    assert not engine.pids("sleep 4249")
    engine.do(engine.runtime.signal(ref, "KILL"))
    assert engine.output(ref) == "hello\n"
    engine.do(engine.runtime.remove(ref))
    assert engine.listed()[0] == {}


def test_a_container_that_the_engine_cannot_kill_is_killed_by_the_kernel(engine: World) -> None:
    assert engine.node is not None
    ref = engine.launch("sh", "-c", "setsid env -i sleep 4251 & exec sleep 4252")
    wait_until(lambda: engine.pids("sleep 4251"))
    binary = engine.node.run(["sh", "-c", f"readlink -f $(command -v {engine.name})"]).stdout.strip()
    refuse = 'case $1 in kill | rm) echo "$1: it is stuck" >&2; exit 125 ;; esac'
    (engine.node.disk / "bin" / str(engine.name)).unlink(missing_ok=True)
    engine.node.install_script(str(engine.name), f'#!/bin/sh\n{refuse}\nexec {binary} "$@"\n')
    said = engine.run(engine.runtime.signal(ref, "TERM"))
    assert (said.exit_code, said.stderr) == (1, b"kill: it is stuck\n")
    engine.do(engine.runtime.signal(ref, "KILL"))
    wait_until(lambda: not engine.pids("sleep 4251") and not engine.pids("sleep 4252"))
    engine.await_phase(ref, "exited")
    said = engine.run(engine.runtime.remove(ref))
    assert (said.exit_code, said.stderr) == (1, b"rm: it is stuck\n")
    engine.node.remove_script(str(engine.name))
    if engine.name is RuntimeName.DOCKER:
        engine.node.start_docker()


def test_a_removal_that_says_nothing_is_looked_after(engine: World) -> None:
    """As podman's, while another one of the same container has removed its storage and not its name yet."""
    assert engine.node is not None
    ref = engine.launch("true")
    engine.await_phase(ref, "exited")
    binary = engine.node.run(["sh", "-c", f"readlink -f $(command -v {engine.name})"]).stdout.strip()
    (engine.node.disk / "bin" / str(engine.name)).unlink(missing_ok=True)
    engine.node.install_script(str(engine.name), f'#!/bin/sh\n[ "$1" != rm ] || exit 0\nexec {binary} "$@"\n')
    result = engine.run(engine.runtime.remove(ref))
    assert (result.exit_code, result.stderr) == (1, f"{engine.name} did not remove it within 120 s\n".encode())
    assert engine.read(ref)["phase"] == "exited", "it is still there, and known"
    once = f'#!/bin/sh\n[ "$1" != rm ] || [ -e /root/once ] || {{ touch /root/once; exit 0; }}\nexec {binary} "$@"\n'
    engine.node.install_script(str(engine.name), once)
    engine.do(engine.runtime.remove(ref))
    assert engine.listed()[0] == {}
    engine.node.remove_script(str(engine.name))
    if engine.name is RuntimeName.DOCKER:
        engine.node.start_docker()


@pytest.mark.parametrize("runs", [False, True])
def test_a_removal_kills_what_runs_and_no_more(engine: World, runs: bool) -> None:
    """podman would wait ten seconds for one that ignores TERM; to kill what has ended is a call in vain."""
    assert engine.node is not None
    ref = engine.launch("sh", "-c", "trap '' TERM; exec sleep 4253" if runs else "true")
    engine.await_phase(ref, "running" if runs else "exited")
    binary = engine.node.run(["sh", "-c", f"readlink -f $(command -v {engine.name})"]).stdout.strip()
    (engine.node.disk / "bin" / str(engine.name)).unlink(missing_ok=True)
    engine.node.install_script(str(engine.name), f'#!/bin/sh\necho "$1" >>/root/asked\nexec {binary} "$@"\n')
    engine.do(engine.runtime.remove(ref))
    asked = (engine.node.disk / "home" / "asked").read_text().split()
    assert asked == (["ps", "kill", "rm"] if runs else ["ps", "rm"])
    assert engine.listed()[0] == {}
    engine.node.remove_script(str(engine.name))
    if engine.name is RuntimeName.DOCKER:
        engine.node.start_docker()


def test_the_job_gets_the_gpus_it_was_given(engine: World) -> None:
    _, output = engine.finish(
        "sh", "-c", "env | grep -E '^GPU_|^NVIDIA_VISIBLE' | sort; ls /dev | grep nvidia", gpus=(0, 3)
    )
    if engine.name is RuntimeName.PODMAN:
        assert output.split() == ["GPU_0=present", "GPU_3=present", "NVIDIA_VISIBLE_DEVICES=void", "nvidia0", "nvidia3"]
    else:
        assert output.split() == ["NVIDIA_VISIBLE_DEVICES=0,3"]


def test_the_job_gets_its_slices_and_nothing_else(engine: World) -> None:
    assert engine.node is not None
    engine.node.cut_gpu(2, "1g.10gb:0", "3g.40gb:4", "1g.10gb:1")
    engine.node.run(["nvidia-ctk", "cdi", "generate", "--output=/var/run/cdi/nvidia.yaml"])
    given = MigSlice(gpu=2, start=1, profile="1g.10gb", uuid="MIG-b", gi=8, ci=0, device=2)
    script = "env | grep -E '^GPU_|^NVIDIA_VISIBLE' | sort; ls /dev | grep 'nvidia[0-9]'; ls /dev/nvidia-caps"
    _, output = engine.finish("sh", "-c", script, gpus=(given.number,), slices=(given,))
    engine.node.run(["rm", "/var/run/cdi/nvidia.yaml"])
    if engine.name is RuntimeName.PODMAN:
        assert output.split() == ["GPU_2_2=present", "NVIDIA_VISIBLE_DEVICES=void", "nvidia2", "nvidia-cap208"]
    else:
        # What a command says on its two streams may come in another order.
        assert [word for word in output.split() if word.startswith("NVIDIA")] == ["NVIDIA_VISIBLE_DEVICES=MIG-b"]


def test_a_job_without_gpus_gets_none(engine: World) -> None:
    _, output = engine.finish("sh", "-c", "env | grep -E '^GPU_|^NVIDIA_VISIBLE'; ls /dev | grep nvidia")
    assert output == "NVIDIA_VISIBLE_DEVICES=void\n"


def test_mounts_and_their_read_only(engine: World) -> None:
    folder = f"/tmp/gpusched-{engine.tag}:1 é"
    engine.sh(f"mkdir '{folder}'; echo in >'{folder}/file'")
    mounts = (Mount(folder, "/data:1 é"), Mount(folder, "/ro", read_only=True))
    script = "cat '/data:1 é/file'; echo new >'/data:1 é/file' && echo written; echo no >/ro/file || echo refused"
    _, output = engine.finish("sh", "-c", script, mounts=mounts)
    # What a command says on its two streams may meet within a line.
    assert all(word in output for word in ("in\n", "written\n", "refused", "Read-only"))
    engine.sh(f"rm -r '{folder}'")


@pytest.mark.parametrize(
    "changes",
    [{"image": "localhost/no/such:1"}, {"mounts": (Mount("/no/such/folder", "/x"),)}, {"workdir": "/proc/1/no"}],
    ids=["image", "mount", "workdir"],
)
def test_a_launch_that_cannot_work_says_why_in_the_engines_words(engine: World, changes: dict[str, object]) -> None:
    ref = engine.launch("true", **changes)
    attempt = engine.await_phase(ref, "failed", "exited")
    if attempt["phase"] == "failed":
        assert attempt["exit_code"] != 0
        assert any(word in attempt["error"].lower() for word in ("such", "exist", "denied", "refused"))
        assert engine.listed_sh()[0][ref.name] == attempt
        assert engine.listed()[0][ref.name]["id"] is None
    engine.do(engine.runtime.remove(ref))
    assert engine.listed()[0] == {}


def test_a_gpu_that_is_not_there_fails_the_launch(engine: World) -> None:
    if engine.name is RuntimeName.DOCKER:  # which GPUs there are is the hook's to know, and the testbed's takes any
        ref = engine.launch("sh", "-c", "echo asked for $NVIDIA_VISIBLE_DEVICES", gpus=(9,))
        engine.await_phase(ref, "exited")
        assert "asked for 9" in engine.output(ref)
        return
    attempt = engine.await_phase(engine.launch("true", gpus=(9,)), "failed")
    assert "nvidia.com/gpu=9" in attempt["error"]


def test_the_submitters_user(engine: World) -> None:
    folder = f"/tmp/gpusched-user-{engine.tag}"
    engine.sh(f"mkdir {folder} && chown 1000:1000 {folder}")
    path = f"{folder}/out"
    ref = engine.launch("id", "-u", run_as=(1000, 1000), output=path)
    engine.await_phase(ref, "exited")
    engine.do(engine.runtime.finish_output(ref))
    assert engine.sh(f"cat {path}; stat -c %u:%g {path}; rm -r {folder}") == "1000\n1000:1000\n"


def test_output_is_written_anew_when_its_follower_was_killed(engine: World) -> None:
    path = f"/tmp/gpusched-lost-{engine.tag}"
    share = f"/tmp/gpusched-{engine.tag}"
    engine.sh(f"mkdir {share}")
    script = "echo one; until [ -e /share/go ]; do sleep 0.1; done; echo two"
    ref = engine.launch("sh", "-c", script, output=path, mounts=(Mount(share, "/share"),))
    wait_until(lambda: engine.sh(f"cat {path} 2>/dev/null; :") == "one\n")
    engine.sh(f"read -r pid since <{engine.folder(ref)}/output.pid; kill -KILL -$pid; touch {share}/go")
    engine.await_phase(ref, "exited")
    assert engine.sh(f"cat {path}") == "one\n"
    engine.do(engine.runtime.finish_output(ref))
    engine.do(engine.runtime.finish_output(ref))
    assert engine.sh(f"cat {path}; rm -r {path} {share}") == "one\ntwo\n"


def test_a_launcher_killed_before_there_is_a_container_is_lost(engine: World) -> None:
    assert engine.node is not None
    engine.node.hang_runtime(str(engine.name))
    ref = engine.launch("true")
    wait_until(lambda: engine.pids("hung infinity", part=True), what="the launcher to call the engine")
    engine.sh(f"read -r pid since <{engine.folder(ref)}/launcher.pid; kill -KILL $pid")
    engine.node.remove_script(str(engine.name))
    if engine.name is RuntimeName.DOCKER:
        engine.node.start_docker()
    assert engine.read(ref)["phase"] == "preparing"  # its client still runs and may yet make the container
    engine.node.run(["sh", "-c", "kill -KILL $(pidof hung) 2>/dev/null; :"])
    attempt = engine.await_phase(ref, "lost")
    assert "launcher died" in attempt["error"]
    assert engine.listed_sh()[0][ref.name] == attempt


def test_a_hung_engine_is_reported_in_time(engine: World) -> None:
    assert engine.node is not None
    engine.node.hang_runtime(str(engine.name))
    found, error, _, _ = engine.listed()
    assert found == {}
    assert error == f"{engine.name} did not answer within 8 s"
    assert engine.listed_sh()[1] == error


@pytest.mark.parametrize("name", [RuntimeName.PODMAN, RuntimeName.DOCKER])
def test_a_command_to_a_hung_engine_fails_with_a_line(
    name: RuntimeName, local: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that waited for ever would keep the next controller from the node."""
    (tmp_path / "bin").mkdir()
    for stand_in, text in (("timeout", "exit 124"), (str(name), "exec sleep 4305")):
        (tmp_path / "bin" / stand_in).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / stand_in).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    runtime, ref = runtime_for(name), local.request("true").ref
    for script in (runtime.signal(ref, "KILL"), runtime.remove(ref)):
        result = local.run(script, 600)
        assert (result.exit_code, result.stderr) == (1, f"{name} did not answer within 45 s\n".encode())


def test_an_engine_that_is_not_installed_is_reported(engine: World) -> None:
    assert engine.node is not None
    engine.node.hide(str(engine.name))
    engine.node.remove_script(str(engine.name))
    assert engine.listed()[1] == f"{engine.name}: No such file or directory"
    assert engine.listed_sh()[1] == f"{engine.name}: No such file or directory"


def test_a_container_without_a_folder_is_listed_and_removed(engine: World) -> None:
    ref = engine.launch("sleep", "6000")
    engine.await_phase(ref, "running")
    engine.sh(f"rm -r {engine.folder(ref)}")
    assert engine.read(ref)["phase"] == "running"
    assert engine.listed_sh()[0][ref.name]["phase"] == "running"
    engine.do(engine.runtime.remove(ref))
    assert engine.listed()[0] == {}


def test_a_strangers_container_of_our_name_is_left_alone(engine: World) -> None:
    name = engine.request("true").name
    words = (str(engine.name), "run", "-d", "--network", "host", "--name", name, IMAGE, "sleep", "6000")
    engine.do(RemoteScript(words))
    ref = engine.launch("true")
    attempt = engine.await_phase(ref, "failed")
    assert "in use" in attempt["error"]
    engine.do(engine.runtime.remove(ref))
    assert inspect(engine, name, "{{.State.Running}}") == "true"


def test_only_the_own_installations_containers_are_listed(engine: World) -> None:
    engine.await_phase(engine.launch("sleep", "6000"), "running")
    theirs = engine.request("sleep", "6000", job="theirs", cluster_id="c-2")
    engine.launched.append(theirs.ref)
    engine.do(engine.runtime.launch(theirs))
    label = f"label=gpusched.cluster={CLUSTER}"
    every = RemoteScript((str(engine.name), "ps", "-q", "--filter", "label=gpusched.cluster"))
    wait_until(lambda: len(engine.do(every).split()) == 2)
    assert len(engine.do(RemoteScript((str(engine.name), "ps", "-q", "--filter", label))).split()) == 1
    assert set(engine.listed()[0]) == {engine.request("true").name}


def test_a_reboot_loses_what_ran(engine: World) -> None:
    assert engine.node is not None
    running = engine.launch("sleep", "6000", job="runs")
    held = engine.launch("sleep", "6000", job="held", hold=True)
    engine.await_phase(running, "running")
    engine.await_phase(held, "ready")
    engine.node.reboot()
    if engine.name is RuntimeName.DOCKER:
        engine.node.start_docker()
    wait_until(lambda: engine.listed()[1] is None, 20)
    for ref in (running, held):
        attempt = engine.read(ref)
        assert (attempt["phase"], attempt["error"]) == ("lost", "the node was rebooted")
        assert engine.listed_sh()[0][ref.name] == attempt
        engine.do(engine.runtime.remove(ref))
    assert engine.listed()[0] == {}
