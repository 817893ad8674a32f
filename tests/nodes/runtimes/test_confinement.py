"""Jobs of submitters: nobody gains privileges, by an image, a link, or what others can read of a launch."""

import shlex
import subprocess
from pathlib import Path

import pytest

from gpusched.model.jobs import Mount
from gpusched.model.resources import RuntimeName
from gpusched.nodes.runtimes.base import AttemptRef
from gpusched.nodes.runtimes.mounts import PIN
from gpusched.nodes.runtimes.shell import forget_job
from gpusched.nodes.transport import RemoteScript
from tests.nodes.runtimes.world import CLUSTER, World
from tests.testbed import wait_until

NOBODY = 65534
AS_NOBODY = {"run_as": (NOBODY, NOBODY)}
SETUID_IMAGE = "localhost/gs/setuid:1"
AS_ROOT = """
#include <unistd.h>
int main(int n, char **words) { setgid(getegid()); setuid(geteuid()); return n > 1 ? execv(words[1], words + 1) : 1; }
"""
STATUS = "grep -E '^(CapEff|CapPrm|CapBnd|CapAmb|NoNewPrivs|Groups|Uid):' /proc/self/status | tr -s '\\t ' '  '"
LEFT = f"grep gpusched-node/{CLUSTER} /proc/mounts; find /run/gpusched-node/{CLUSTER} -mindepth 2; :"
"""The remains of attempts' mounts."""
LOGGING = """#!/bin/sh
printf '%s\\n' "$*" >>/tmp/{words}
exec {program} "$@"
"""


def setuid_image(world: World, folder: Path) -> None:
    """An image with a setuid-root program, and a group of root's that is called as nobody's is numbered."""
    assert world.node is not None
    (folder / "as_root.c").write_text(AS_ROOT)
    subprocess.run(["gcc", "-O1", "-static", "-o", folder / "as_root", folder / "as_root.c"], check=True)
    world.sh(f"""set -e; cd {folder}; mkdir root; {world.name} create --name base --network host localhost/gs/busybox:1
{world.name} export base | tar -x -C root; {world.name} rm base; cp as_root root/bin/; chown 0:0 root/bin/as_root
chmod 4755 root/bin/as_root; echo '{NOBODY}:x:0:0::/:/bin/sh' >root/etc/passwd; echo '{NOBODY}:x:0:' >root/etc/group
tar -C root -c . | {world.name} import --change 'ENV PATH=/bin' - {SETUID_IMAGE} >/dev/null""")


@pytest.fixture
def folder(engine: World) -> Path:
    """A folder that all nodes have, as /tmp is theirs, and that everybody may write."""
    path = Path(engine.sh(f"mkdir -m 1777 /tmp/gpusched-{engine.tag}; echo /tmp/gpusched-{engine.tag}").strip())
    assert path.is_dir()
    return path


def test_no_image_makes_a_submitter_root(engine: World, folder: Path) -> None:
    setuid_image(engine, folder)
    engine.sh(f"echo theirs >{folder}/theirs; chmod 600 {folder}/theirs")
    # What is refused is said on stderr, which an engine may hand over before earlier lines of stdout: both are one.
    script = f"""exec 2>&1
{STATUS}; as_root /bin/sh -c "{STATUS}; cat /d/theirs; cp /bin/as_root /d/left; chmod 4755 /d/left"
echo ran; until [ -e /d/go ]; do sleep 0.1; done"""
    mounts = (Mount(str(folder), "/d"),)
    ref = engine.launch("sh", "-c", script, image=SETUID_IMAGE, mounts=mounts, **AS_NOBODY)
    wait_until(lambda: "ran\n" in engine.output(ref), what="the job")
    confined = [
        f"Uid: {NOBODY} {NOBODY} {NOBODY} {NOBODY}", f"Groups: {NOBODY}", "CapPrm: 0000000000000000",
        "CapEff: 0000000000000000", "CapBnd: 0000000000000000", "CapAmb: 0000000000000000", "NoNewPrivs: 1",
    ]  # fmt: skip
    lines = [line.strip() for line in engine.output(ref).splitlines()]
    assert lines[:14] == confined + confined
    assert "theirs" not in lines
    assert engine.sh(f"stat -c %u:%a {folder}/left").strip() in ("65534:755", "65534:4755")  # nobody's own, at most
    beside = engine.runtime.exec_argv(ref, ("as_root", "/bin/sh", "-c", f"{STATUS}; cat /d/theirs"), False)
    found = engine.run(RemoteScript(beside))
    lines = [line.strip() for line in found.stdout.decode().splitlines()]
    assert [line for line in lines if "Groups" not in line] == [line for line in confined if "Groups" not in line]
    assert {line for line in lines if "Groups" in line} <= {"Groups:", f"Groups: {NOBODY}"}
    engine.sh(f"touch {folder}/go")
    engine.await_phase(ref, "exited")
    engine.sh(f"rm -r {folder}")


def test_capabilities_are_given_back_by_name(engine: World) -> None:
    _, output = engine.finish("sh", "-c", STATUS, capabilities=("NET_RAW",), **AS_NOBODY)
    assert "CapBnd: 0000000000002000" in output
    # docker gives users other than root none that they could use.
    assert ("CapEff: 0000000000002000" in output) == (engine.name is RuntimeName.PODMAN)


def test_mounts_of_submitters_stay_beneath_the_allowed_folders(engine: World, folder: Path) -> None:
    secret = f"/root/secret-{engine.tag}"
    engine.sh(f"""set -e; mkdir {secret} {folder}/real {folder}/real/in; echo hush >{secret}/file; cd {folder}/real
echo inside >in/file; ln -s in inner; ln -s in/file innerfile; ln -s {secret} out; ln -s {secret}/file outfile
ln -s / rootfs; ln -s real ../allowed; ln -s /proc/self/root/root up; echo one >../single; ln -s ../single alike""")
    beneath = {"mounts_beneath": ("/no/such/folder", f"{folder}/allowed", f"{folder}/single"), **AS_NOBODY}

    def mount(source: str, job: str) -> tuple[dict[str, object], str]:
        mounts = (Mount(f"{folder}/allowed/in", "/first"), Mount(source, "/m"))
        return engine.finish("sh", "-c", "cat /m /m/file 2>/dev/null", job=job, mounts=mounts, **beneath)

    good = ("in", "inner", "innerfile", "in/file", "alike")
    for number, name in enumerate(good):
        attempt, output = mount(f"{folder}/allowed/{name}", f"good{number}")
        assert (attempt["phase"], output) == ("exited", "one\n" if name == "alike" else "inside\n"), (name, attempt)
    bad = ("out", "outfile", "rootfs", "up", "none", "in/../../outside", "rootfs/etc")
    for number, name in enumerate(bad):
        source = f"{folder}/allowed/{name}"
        attempt, _ = mount(source, f"bad{number}")
        why = f"refused: cannot mount {source}: there is no such place beneath settings.allowed_mounts on this node"
        assert (attempt["phase"], attempt["error"]) == ("failed", why)
    assert engine.sh(LEFT) == ""
    assert engine.sh(f"cat {folder}/real/in/file {secret}/file; rm -r {folder} {secret}") == "inside\nhush\n"


def test_a_gangs_mounts_are_what_they_were_when_it_was_made_ready(engine: World, folder: Path) -> None:
    engine.sh(f"""set -e; mkdir {folder}/in {folder}/in/below /root/out-{engine.tag}; echo inside >{folder}/in/file
mount -t tmpfs none {folder}/in/below; echo deep >{folder}/in/below/file; ln -s in {folder}/link""")
    changes = {"mounts": (Mount(f"{folder}/link", "/m"),), "mounts_beneath": (str(folder),), "hold": True, **AS_NOBODY}
    started = engine.launch("cat", "/m/file", "/m/below/file", job="starts", **changes)
    removed = engine.launch("true", job="removed", **changes)
    for ref in (started, removed):
        engine.await_phase(ref, "ready")
    engine.sh(f"rm {folder}/link; ln -s /root/out-{engine.tag} {folder}/link")
    engine.do(engine.runtime.remove(removed))
    engine.do(engine.runtime.start(started))
    engine.await_phase(started, "exited")
    assert engine.output(started) == "inside\ndeep\n"
    assert engine.sh(LEFT) == ""
    assert engine.sh(f"cat {folder}/in/file {folder}/in/below/file; umount {folder}/in/below") == "inside\ndeep\n"
    engine.sh(f"rm -r {folder} /root/out-{engine.tag}")


# RENAME_EXCHANGE: at every moment there is either the folder or the link.
SWAP = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
while True:
    if libc.renameat2(-100, sys.argv[1].encode(), -100, sys.argv[2].encode(), 2):
        sys.exit(ctypes.get_errno())
"""


def test_links_swapped_all_the_while_lead_nowhere(process: World) -> None:
    folder = f"/tmp/gpusched-{process.tag}"
    script = f"""{PIN}
mkdir -p {folder}/in/a/b {folder}/out/b; cd {folder}; echo in >in/a/b/file; echo out >out/b/file; ln -s ../out in/c
python3 -c {shlex.quote(SWAP)} {folder}/in/a {folder}/in/c & swapper=$!
n=0
while [ $n -lt 150 ]; do
    n=$((n + 1))
    for what in a/b a/b/file; do
        if pin {folder}/in/$what {folder}/place {folder}/in 2>/dev/null; then
            cat {folder}/place/file {folder}/place 2>/dev/null
        else
            echo refused
        fi
        umount {folder}/place 2>/dev/null; rmdir {folder}/place 2>/dev/null || rm -f {folder}/place
    done
done
kill $swapper"""
    said = process.run(RemoteScript(("sh", "-s"), script.encode()), 120).stdout.decode().split()
    assert len(said) == 300
    assert set(said) == {"in", "refused"}
    process.sh(f"rm -r {folder}")


def test_variables_are_no_arguments_of_an_engine(engine: World) -> None:
    assert engine.node is not None
    engine.node.install_script(str(engine.name), LOGGING.format(program=f"/usr/bin/{engine.name}", words=engine.tag))
    env = {"PLAIN": "value-71\nvalue-72", "GOOGLE_KEY": "value-73\nvalue-74", "LC_ALL": "value-75"}
    _, output = engine.finish("sh", "-c", 'echo "$PLAIN $GOOGLE_KEY $LC_ALL"', env=env)
    assert output == "value-71\nvalue-72 value-73\nvalue-74 value-75\n"
    words = engine.sh(f"cat /tmp/{engine.tag}; rm /tmp/{engine.tag}")
    assert "create" in words
    assert "PLAIN" in words
    assert "value-7" not in words


def test_variables_are_no_arguments_of_a_process(process: World) -> None:
    assert process.node is not None
    process.sh(f": >/tmp/{process.tag}; chmod 666 /tmp/{process.tag}")
    for program in ("env", "setpriv", "setsid", "sh", "cat"):
        process.node.install_script(program, LOGGING.format(program=f"/usr/bin/{program}", words=process.tag))
    env = {"PLAIN": "value-71\nvalue-72", "PATH": "/usr/bin:/value-73", "LD_X": "value-74"}
    ref = process.launch("/bin/sh", "-c", 'echo "$PLAIN"; /usr/bin/env; exec /bin/sleep 6000', env=env, **AS_NOBODY)
    wait_until(lambda: "LD_X=value-74\n" in process.output(ref), what="the job's variables")
    assert process.output(ref).startswith("value-71\nvalue-72\n")
    assert "PATH=/usr/bin:/value-73\n" in process.output(ref)
    beside = process.run(RemoteScript(process.runtime.exec_argv(ref, ("/bin/sh", "-c", 'echo "$PLAIN"'), False)))
    assert beside.stdout == b"value-71\nvalue-72\n"
    words = process.sh(f"cat /tmp/{process.tag}; rm /tmp/{process.tag}")
    assert "setpriv" in words or "env" in words
    assert "value-7" not in words


def test_processes_of_submitters_gain_no_privileges(process: World) -> None:
    _, output = process.finish("sh", "-c", STATUS, **AS_NOBODY)
    assert f"Uid: {NOBODY} {NOBODY} {NOBODY} {NOBODY}" in output
    for name in ("Prm", "Eff", "Bnd", "Amb"):
        assert f"Cap{name}: 0000000000000000" in output
    assert "NoNewPrivs: 1" in output
    _, output = process.finish("sh", "-c", STATUS, job="job2", capabilities=("NET_RAW",), **AS_NOBODY)
    assert all(f"Cap{name}: 0000000000002000" in output for name in ("Eff", "Bnd", "Amb"))


def test_the_jobs_folder_is_its_users_alone(engine: World) -> None:
    job = f"own{engine.tag}"
    script = 'cd "$GPUSCHED_JOB_DIR" && echo "{\\"step\\": 3}" >progress.json && ln -s /etc/shadow saved.json; ls -la'
    attempt, output = engine.finish("sh", "-c", script, job=job, **AS_NOBODY)
    assert attempt["progress"]["step"] == 3, output
    assert attempt["job_file_error"] == "saved.json: it is not a regular file"
    place = f"/var/lib/gpusched-node/{CLUSTER}/{engine.node_name}"
    assert engine.sh(f"stat -c %u:%a {place} {place}/{job}").split() == ["0:711", f"{NOBODY}:700"]
    engine.do(forget_job(AttemptRef(CLUSTER, engine.node_name, f"gpusched-{job}-1-0"), job))
    engine.sh(f"test -d {place} && test ! -e {place}/{job}")
