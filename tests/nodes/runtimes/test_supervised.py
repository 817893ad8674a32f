"""Jobs without a container engine: processes, and apptainer's builder against a stand-in."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpusched.errors import UsageError
from gpusched.model.jobs import Mount
from gpusched.model.resources import RuntimeName
from gpusched.nodes.runtimes.apptainer import Apptainer
from tests.nodes.runtimes.conftest import Connections, make_world
from tests.nodes.runtimes.world import World
from tests.testbed import Testbed, wait_until


def test_a_job_whose_supervisor_was_killed_runs_on_and_can_be_killed(process: World) -> None:
    ref = process.launch("sh", "-c", "echo up; exec sleep 4301")
    wait_until(lambda: process.output(ref) == "up\n")
    process.sh(f"read -r pid since <{process.folder(ref)}/launcher.pid; kill -KILL $pid")
    wait_until(lambda: process.read(ref)["phase"] == "running")
    assert process.listed_sh()[0][ref.name] == process.read(ref)
    process.do(process.runtime.signal(ref, "KILL"))
    attempt = process.await_phase(ref, "lost")
    assert "supervisor was killed" in attempt["error"]
    assert process.pids("sleep 4301") == []
    assert process.listed_sh()[0][ref.name] == attempt


def test_remove_ends_a_job_without_supervisor(process: World) -> None:
    ref = process.launch("sh", "-c", "setsid sleep 4302 & exec sleep 4302")
    wait_until(lambda: len(process.pids("sleep 4302")) == 2)
    process.sh(f"read -r pid since <{process.folder(ref)}/launcher.pid; kill -KILL $pid")
    process.do(process.runtime.remove(ref))
    assert process.pids("sleep 4302") == []
    assert process.listed()[0] == {}


def test_output_that_goes_as_it_is_read_leaves_no_error_in_it(local: World) -> None:
    ref = local.launch("echo", "up")
    local.await_phase(ref, "exited")
    log = local.runtime.log(ref)
    # It is measured twice.
    gone_then = 'grep() { command grep "$@"; [ ! -e "$dir/measured" ] || rm -f "$out"; : >"$dir/measured"; }\n'
    result = local.run(replace(log, argv=("sh", "-c", gone_then + log.argv[2])), 60)
    assert (result.stdout, result.stderr) == (b"", b"")


def test_a_removal_reports_what_cannot_be_killed_and_leaves_its_folder(local: World, tmp_path: Path) -> None:
    """As of what waits for a dead disk. Nor is a number killed that is another process's when its turn comes."""
    ref = local.launch("true")
    local.await_phase(ref, "exited")
    stray = subprocess.Popen(["sleep", "4303"], env={**os.environ, "GPUSCHED_CONTAINER": ref.name})
    other = subprocess.Popen(["sleep", "4303"])
    stand_ins = (
        f"kill() {{ echo \"$*\" >>{tmp_path}/kills; }}\nsleep() {{ :; }}\n"
        f'grep() {{ [ $# = 7 ] || echo /proc/{other.pid}/environ; command grep "$@"; }}\n'
    )
    try:
        remove = local.runtime.remove(ref)
        result = local.run(replace(remove, stdin=stand_ins.encode() + remove.stdin), 600)
        assert (result.exit_code, result.stderr) == (1, b"its processes cannot be killed\n")
        assert ref.name in local.listed()[0]
        killed = set((tmp_path / "kills").read_text().splitlines())
        assert (f"-KILL {stray.pid}" in killed, f"-KILL {other.pid}" in killed) == (True, False)
    finally:
        for process in (stray, other):
            process.kill()
            process.wait()


HELD_CAT = """#!/bin/sh
read -r _ _ _ _ _ session _ </proc/self/stat
case $(tr '\\0' ' ' <"/proc/$session/cmdline") in *' child ')
    echo "$session" >FOLDER/starting.tmp && mv FOLDER/starting.tmp FOLDER/starting
    until [ -e FOLDER/go ]; do sleep 0.05; done ;;
esac
exec /bin/cat "$@"
"""
HELD_RM = """#!/bin/sh
: >FOLDER/go
until [ -e FOLDER/running ] || ! grep -qs '^State:.[^Z]' "/proc/$(cat FOLDER/starting)/status"; do sleep 0.05; done
exec /bin/rm "$@"
"""


def test_a_job_that_starts_while_it_is_removed_does_not_stay(
    local: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left its launcher's group, is not stamped yet when the removal looks, and runs before its folder goes."""
    path = os.environ["PATH"]
    for name, text in (("cat", HELD_CAT), ("rm", HELD_RM)):
        (tmp_path / f"bin-{name}").mkdir()
        (tmp_path / f"bin-{name}" / name).write_text(text.replace("FOLDER", str(tmp_path)))
        (tmp_path / f"bin-{name}" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin-cat:{path}")
    ref = local.launch("sh", "-c", f": >{tmp_path}/running; exec sleep 4304")
    wait_until((tmp_path / "starting").exists)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin-rm:{path}")
    local.run(local.runtime.remove(ref), 600)
    assert named(ref.name) == []


def named(name: str) -> list[str]:
    """Processes that carry an attempt's name."""
    mark = f"GPUSCHED_CONTAINER={name}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [str(path)] if mark in path.read_bytes() else []
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_job_that_fills_the_disk_is_known_to_have_ended(local: World, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    request = local.request("sh", "-c", "cat /dev/zero >fill 2>/dev/null; exit 3", workdir=str(tmp_path / "state"))
    script = local.runtime.launch(request).stdin.decode()
    wait = """until read -r launcher since <"$dir/launcher.pid"; do sleep 0.1; done
until [ -e "$dir/exit" ] || [ "$(starttime "$launcher")" != "$since" ]; do sleep 0.1; done
cat "$dir/exit"
"""
    inside = f"mount -t tmpfs -o size=256k none {tmp_path}/state && sh -s"
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside]
    done = subprocess.run(words, input=script + wait, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[1].split()[0] == "3", done.stderr
    assert done.stdout.startswith("launched\n")


def test_the_submitters_user_home_and_groups(process: World) -> None:
    folder = f"/tmp/gpusched-user-{process.tag}"
    process.sh(f"mkdir {folder} && chown 65534 {folder}")
    path = f"{folder}/out"
    script = 'id -u; id -g; echo "$USER" "$TOKEN"; cat /root/.bashrc 2>/dev/null || echo closed'
    ref = process.launch("sh", "-c", script, run_as=(65534, 65534), secrets={"TOKEN": "t1"}, output=path)
    attempt = process.await_phase(ref, "exited")
    assert attempt["exit_code"] == 0
    assert process.output(ref).splitlines() == ["65534", "65534", "nobody t1", "closed"]
    assert process.sh(f"stat -c %u {path}; rm -r {folder}") == "65534\n"


def test_a_link_in_place_of_the_output_shows_nothing_that_its_user_may_not_see(process: World) -> None:
    folder = process.sh("umask 077; dir=$(mktemp -d /tmp/gpusched-XXXXXX); chown 65534 $dir; echo $dir").strip()
    secret, path = f"/root/{process.tag}", f"{folder}/out"
    process.sh(f"umask 077; echo secret >{secret}")
    try:
        script = 'echo mine; rm "$1"; ln -s "$2" "$1"; sleep 6000'
        ref = process.launch("sh", "-c", script, "sh", path, secret, run_as=(65534, 65534), output=path)
        wait_until(lambda: process.sh(f"[ ! -L {path} ] || echo linked") == "linked\n")
        assert "secret" not in process.output(ref)
    finally:
        process.sh(f"rm -r {folder} {secret}")


def test_output_where_the_submitter_may_not_write_fails(process: World) -> None:
    attempt = process.await_phase(process.launch("true", run_as=(65534, 65534), output="/root/out"), "failed")
    assert "cannot write the output file /root/out" in attempt["error"]


def test_a_missing_workdir_fails(process: World) -> None:
    attempt = process.await_phase(process.launch("true", workdir="/no/such"), "failed")
    assert "cannot enter the workdir /no/such" in attempt["error"]


def test_a_reboot_loses_what_ran(process: World) -> None:
    assert process.node is not None
    ref = process.launch("sleep", "6000")
    process.await_phase(ref, "running")
    process.node.reboot()
    attempt = process.read(ref)
    assert (attempt["phase"], attempt["error"]) == ("lost", "the node was rebooted")
    assert process.listed_sh()[0][ref.name] == attempt


def test_options_that_the_process_runtime_lacks_are_refused(process: World) -> None:
    with pytest.raises(UsageError, match="needs a command"):
        process.runtime.launch(process.request())
    with pytest.raises(UsageError, match="cannot mount"):
        process.runtime.launch(process.request("true", mounts=(Mount("/a", "/b"),)))


@pytest.mark.parametrize("shell", ["bash", "busybox"])
def test_nodes_whose_sh_is_another(process: World, shell: str) -> None:
    assert process.node is not None
    if not process.sh(f"command -v {shell} || :"):
        pytest.skip(f"there is no {shell}")
    applets = "for a in tail head wc cat grep sed stat date mkdir rm mv ln; do ln -sf /bin/busybox $bin/$a; done"
    bin_folder = process.node.disk / "bin"
    process.sh(f"bin={bin_folder}; ln -s $(command -v {shell}) $bin/sh; " + (applets if shell == "busybox" else ""))
    value = "a'b\n$(id) é\\"
    script = 'printf %s "$1$V" >/tmp/gpusched-shell; trap "echo got; exit 3" TERM; echo up; while :; do sleep 0.1; done'
    ref = process.launch("sh", "-c", script, "sh", value, env={"V": value}, hold=True)
    process.await_phase(ref, "ready")
    process.do(process.runtime.start(ref))
    wait_until(lambda: process.output(ref) == "up\n")
    assert process.sh("cat /tmp/gpusched-shell; rm /tmp/gpusched-shell") == value + value
    assert process.listed_sh()[0][ref.name] == process.await_phase(ref, "running")
    process.do(process.runtime.signal(ref, "TERM"))
    assert process.await_phase(ref, "exited")["exit_code"] == 3
    assert "got\n" in process.output(ref, tail_bytes=20)
    assert b"".join(process.transport.stream(process.runtime.log(ref, follow=True))).startswith(b"up\n")
    process.do(process.runtime.remove(ref))
    assert process.listed()[0] == {}


# apptainer cannot be installed on this machine. This STAND-IN shows what the real one would be called with, and runs
# the command on the node with the variables that apptainer would hand in; that real apptainer obeys is not tested.
STAND_IN = """#!/bin/sh
[ "$1" = --version ] && { echo 'apptainer version 1.3.0-stand-in'; exit; }
printf '%s\\n' "$*" >>/root/apptainer.calls
if [ "$1" = pull ]; then
    [ "$3" != docker://no/such ] || { echo 'FATAL: no such image' >&2; exit 255; }
    echo sif >"$2"; exit
fi
shift
while :; do
    case $1 in --pwd | --mount | --bind) shift 2 ;; --*) shift ;; *) break ;; esac
done
[ -e "$1" ] || exit 255
shift
for name in $(env | sed -n 's/^APPTAINERENV_\\([A-Z0-9_]*\\)=.*/\\1/p'); do
    eval "export $name=\\"\\$APPTAINERENV_$name\\""
done
exec "$@"
"""


@pytest.fixture
def apptainer(testbed: Testbed, connections: Connections) -> Iterator[World]:
    world = make_world("process", testbed, connections, RuntimeName.APPTAINER)
    assert world.node is not None
    world.node.install_script("apptainer", STAND_IN)
    yield world
    world.clean()


def test_stand_in_for_apptainer_pulls_once_and_runs(apptainer: World) -> None:
    mounts = (Mount("/a b", "/c", read_only=True),)
    changes = {"gpus": (1,), "workdir": "/w d", "mounts": mounts, "env": {"V": "a,b'c"}}
    script = 'echo "$V" "$TOKEN" "$GPUSCHED_CONTAINER"; exit 5'
    attempt, output = apptainer.finish("sh", "-c", script, secrets={"TOKEN": "hush"}, image="one/image:1", **changes)
    assert (attempt["phase"], attempt["exit_code"]) == ("exited", 5)
    assert output == f"a,b'c hush {attempt['name']}\n"
    apptainer.finish("true", job="job2", image="one/image:1")
    pull, run, again = apptainer.sh("cat /root/apptainer.calls").splitlines()
    assert pull.endswith("docker://one/image:1")
    host = apptainer.sh("uname -n").strip()
    assert f".sif.{host}." in pull.split()[1], "another node that shares this home may pull it at this moment"
    assert run.startswith(
        "exec --no-eval --cleanenv --nv --pwd /w d --mount type=bind,src=/a b,dst=/c,ro --bind /root/.local/state/"
    )
    assert " /root/.cache/" in run
    assert again.startswith("exec --no-eval --cleanenv")
    assert "hush" not in apptainer.sh("cat /root/apptainer.calls")
    assert apptainer.listed(version=True)[2] == "apptainer version 1.3.0-stand-in"


def test_stand_in_for_apptainer_pulls_while_a_gang_prepares(apptainer: World) -> None:
    ref = apptainer.launch("sh", "-c", "echo ran", hold=True, image="one/gang")
    apptainer.await_phase(ref, "ready")
    assert apptainer.sh("cat /root/apptainer.calls").startswith("pull ")
    apptainer.do(apptainer.runtime.start(ref))
    apptainer.await_phase(ref, "exited")
    assert apptainer.output(ref) == "ran\n"


def test_stand_in_for_apptainer_without_the_image(apptainer: World) -> None:
    attempt = apptainer.await_phase(apptainer.launch("true", image="no/such"), "failed")
    assert (attempt["exit_code"], attempt["error"]) == (255, "FATAL: no such image")
    attempt = apptainer.await_phase(apptainer.launch("true", job="job2", image="docker://no/such"), "failed")
    assert attempt["exit_code"] == 255


def test_an_image_in_a_home_that_only_its_user_sees_is_pulled_once_and_what_a_killed_pull_left_goes(
    local: World, tmp_path: Path
) -> None:
    """As root is nobody in a home on NFS. The home is there while something is done as the user."""
    home, hidden = tmp_path / "home", tmp_path / "hidden"
    images = hidden / ".cache/gpusched/images"
    images.mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = os.uname().nodename
    kept = {f"a.sif.{host}.{os.getpid()}", f"a.sif.elsewhere.{gone.pid}", "a.sif"}
    for name in (*kept, f"b.sif.{host}.{gone.pid}"):
        (images / name).touch()
    stand_ins = f"""\
home={home}
as_user() {{ mv {hidden} {home}; "$@"; set -- $?; mv {home} {hidden}; return "$1"; }}
env() {{ echo pulled; : >"$4"; }}
"""
    program = Apptainer().program(local.request("true", image="one/image:1"))
    script = stand_ins + program + "prepare && prepare && prepare; exit"
    done = subprocess.run(["sh", "-s"], input=script, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "pulled\n", "")
    left = {path.name for path in images.iterdir()}
    (pulled,) = left - kept
    assert left - {pulled} == kept
    assert pulled.endswith(".sif")


def test_stand_in_for_apptainer_takes_a_file_as_it_is(apptainer: World) -> None:
    apptainer.sh("touch '/root/my image.sif'")
    attempt, output = apptainer.finish("echo", "x", image="/root/my image.sif")
    assert (attempt["exit_code"], output) == (0, "x\n")
    assert "pull" not in apptainer.sh("cat /root/apptainer.calls")
