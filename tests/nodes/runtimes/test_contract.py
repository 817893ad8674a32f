"""The contract of every runtime, on real nodes: a local process, processes over SSH, podman, docker."""

import json
import shlex
import threading
import time
from pathlib import Path

import pytest

from gpusched.model.resources import RuntimeName
from gpusched.nodes.runtimes import EXISTS_EXIT_CODE, AttemptRef
from gpusched.nodes.runtimes.shell import forget_job, result, write_answer
from gpusched.nodes.transport import RemoteScript
from tests.nodes.runtimes.world import CLUSTER, World, once_contained
from tests.testbed import wait_until

HOSTILE = [
    *(
        "",
        " ",
        "a'b",
        '"',
        "\\",
        "\\n",
        "a\nb",
        "\n",
        "$(id)",
        "`id`",
        "${HOME}",
        "$'x'",
        "!!",
        "*",
        "~",
        "-",
        "--",
        "a=b",
        "%s",
    ),
    *("\t", "\r\n", "é", "日本語", "\U0001f600", "\x81\x82", "\x01\x1b[31m", "; rm -rf /tmp/x", "| cat", "&", "#"),
    *("'\"'\"'", "END_", "EOF", "{{.ID}}", "a,b", "a:b", "x" * 5000),
]

PRINT_EACH = 'for a in "$@"; do printf "%s" "$a" | od -An -v -tx1 | tr -d " \\n"; echo; done'


def test_a_job_runs_and_its_exit_code_comes_back(world: World) -> None:
    before = time.time()
    attempt, output = world.finish("sh", "-c", "echo out; echo err >&2; exit 3")
    assert sorted(output.splitlines()) == ["err", "out"]
    assert (attempt["phase"], attempt["exit_code"], attempt["error"]) == ("exited", 3, None)
    assert attempt["cluster_id"] == CLUSTER
    assert not attempt["oom_killed"]
    assert before - 2 <= attempt["started_at"] <= attempt["finished_at"] + 1 <= time.time() + 2


def test_a_command_that_is_not_there_exits_with_127(world: World) -> None:
    attempt, _ = world.finish("no-such-command")
    assert (attempt["phase"], attempt["exit_code"]) in [("exited", 127), ("failed", 127)]


def test_every_argument_arrives_as_it_is(world: World) -> None:
    _, output = world.finish("sh", "-c", PRINT_EACH, "sh", *HOSTILE)
    assert [bytes.fromhex(line).decode() for line in output.split("\n")[:-1]] == HOSTILE


def test_every_variable_arrives_as_it_is(world: World) -> None:
    env = {f"V{i}": value for i, value in enumerate(HOSTILE)}
    secrets = {f"S{i}": value for i, value in enumerate(HOSTILE)}
    names = " ".join(f'"${name}"' for name in [*env, *secrets])
    # Names that would change what the engine's client, or the shell, does that carries them.
    lines = [value for value in HOSTILE if "\n" not in value and "\r" not in value]
    steering = {f"LC_{i}": value for i, value in enumerate(lines)} | {"HOME": "/h", "DOCKER_HOST": "x", "TMPDIR": "/s3"}
    names += "".join(f' "${name}"' for name in steering)
    # Names that the scripts use themselves, as root: one that is called dir must not say where the launcher is.
    own = {"memlock": "--privileged", "uid": "0", "home": "/nowhere", "binary": "sh", "options": "-v /:/host"}
    own_secrets = {"dir": "/nowhere", "name": "n", "output": "/nowhere/o", "workdir": "/nowhere", "code": "7"}
    names += "".join(f' "${name}"' for name in (*own, *own_secrets))
    env |= steering | own
    secrets |= own_secrets
    _, output = world.finish("sh", "-c", f"set -- {names}; {PRINT_EACH}", env=env, secrets=secrets)
    expected = [*HOSTILE, *HOSTILE, *steering.values(), *own.values(), *own_secrets.values()]
    assert [bytes.fromhex(line).decode() for line in output.split("\n")[:-1]] == expected


def test_an_argument_and_a_variable_of_100_kb(world: World) -> None:
    big = "ä'" * 33_000
    attempt, output = world.finish("sh", "-c", 'echo ${#1} ${#V}; [ "$1" = "$V" ]', "sh", big, env={"V": big})
    assert attempt["exit_code"] == 0, output


@once_contained
def test_a_second_launch_of_the_same_name_starts_nothing(world: World) -> None:
    ref = world.launch("sh", "-c", "echo first; sleep 6000")
    again = world.run(world.runtime.launch(world.request("sh", "-c", "echo second")))
    assert (again.exit_code, again.stdout) == (EXISTS_EXIT_CODE, b"exists\n")
    world.await_phase(ref, "running")
    wait_until(lambda: world.output(ref) == "first\n")
    since = world.ran_s[ref.name]
    assert since is not None
    assert 0 <= since < 3600, "since its start, by the node's boot clock"
    world.read(ref)
    later = world.ran_s[ref.name]
    assert later is not None
    assert later > since


@once_contained
def test_ten_launches_at_once_have_one_winner(world: World) -> None:
    request = world.request("sleep", "6000")
    world.launched.append(request.ref)
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(world.run(world.runtime.launch(request)).exit_code))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [0] + [EXISTS_EXIT_CODE] * 7
    world.await_phase(request.ref, "running")


def test_a_gang_waits_until_it_is_started_and_runs_once(world: World) -> None:
    ref = world.launch("sh", "-c", "echo ran", hold=True)
    assert world.await_phase(ref, "ready")["exit_code"] is None
    assert world.output(ref) == ""
    world.do(world.runtime.start(ref))
    world.await_phase(ref, "exited")
    world.do(world.runtime.start(ref))
    world.do(world.runtime.start(ref))
    assert world.read(ref)["phase"] == "exited"
    assert world.output(ref) == "ran\n"


def test_a_start_of_what_is_not_there_fails(world: World) -> None:
    result = world.run(world.runtime.start(world.request("true").ref))
    assert result.exit_code == 1
    assert b"is not on this node" in result.stderr


def test_signals_reach_the_job_and_repeat_harmlessly(world: World) -> None:
    ref = world.launch("sh", "-c", 'trap "echo got TERM" TERM; echo up; while :; do sleep 0.1; done')
    wait_until(lambda: world.output(ref) == "up\n")
    world.do(world.runtime.signal(ref, "TERM"))
    wait_until(lambda: "got TERM\n" in world.output(ref))
    assert world.read(ref)["phase"] == "running"
    world.do(world.runtime.signal(ref, "KILL"))
    attempt = world.await_phase(ref, "exited")
    assert (attempt["exit_code"], attempt["oom_killed"]) == (137, False)
    world.do(world.runtime.signal(ref, "TERM"))
    world.do(world.runtime.signal(ref, "KILL"))
    world.do(world.runtime.remove(ref))
    world.do(world.runtime.signal(ref, "KILL"))


def test_kill_reaches_processes_that_left_the_group(world: World) -> None:
    ref = world.launch("sh", "-c", "setsid sleep 4242 & setsid setsid sleep 4242 & echo up; wait")
    wait_until(lambda: len(world.pids("sleep 4242")) >= 2)
    world.do(world.runtime.signal(ref, "KILL"))
    wait_until(lambda: not world.pids("sleep 4242"))
    world.await_phase(ref, "exited")


def test_strays_do_not_outlive_the_job(world: World) -> None:
    ref = world.launch("sh", "-c", "setsid sleep 4243 & sleep 0.2")
    world.await_phase(ref, "exited")
    assert not world.pids("sleep 4243")


def test_remove_ends_everything_and_repeats_harmlessly(world: World) -> None:
    ref = world.launch(
        "sh", "-c", "trap '' TERM; setsid sleep 4244 & sleep 4244", output=f"/tmp/gpusched-out-{world.tag}"
    )
    world.await_phase(ref, "running")
    world.do(world.runtime.remove(ref))
    assert world.listed()[0] == {}
    wait_until(lambda: not world.pids("sleep 4244"))
    assert world.sh(f"ls -d {world.folder(ref)} 2>/dev/null || echo gone") == "gone\n"
    world.do(world.runtime.remove(ref))
    wait_until(lambda: not world.pids("logs -f", part=True))
    assert world.pids(ref.name, part=True) == []
    world.sh(f"rm /tmp/gpusched-out-{world.tag}")


def test_the_log_of_a_running_job_and_its_tail(world: World) -> None:
    ref = world.launch("sh", "-c", "echo one; echo two; echo three; sleep 6000")
    wait_until(lambda: "three" in world.output(ref))
    assert world.output(ref, tail_bytes=6) == "three\n"
    assert world.output(ref, tail_bytes=0) == ""
    assert world.output(ref, tail_bytes=1000) == world.output(ref)


def test_following_ends_with_the_job_and_misses_nothing(world: World) -> None:
    ref = world.launch("sh", "-c", "i=0; while [ $i -lt 20 ]; do echo line $i; i=$((i+1)); sleep 0.05; done")
    text = b"".join(world.transport.stream(world.runtime.log(ref, follow=True))).decode()
    assert text.splitlines() == [f"line {i}" for i in range(20)]


def test_following_from_a_tail_of_bytes(world: World) -> None:
    ref = world.launch("sh", "-c", "echo 0123456789; exec sleep 6000")
    wait_until(lambda: world.output(ref) == "0123456789\n")
    chunks = world.transport.stream(world.runtime.log(ref, follow=True, tail_bytes=3))
    assert next(chunks) == b"89\n"
    chunks.close()  # type: ignore[attr-defined]


def test_following_a_held_job_waits_for_its_start(world: World) -> None:
    ref = world.launch("echo", "hello", hold=True)
    world.await_phase(ref, "ready")
    follower = world.transport.stream(world.runtime.log(ref, follow=True))
    timer = threading.Timer(0.5, lambda: world.do(world.runtime.start(ref)))
    timer.start()
    assert b"".join(follower) == b"hello\n"
    timer.join()


def test_a_reader_that_goes_away_leaves_nothing_behind(world: World) -> None:
    ref = world.launch("sh", "-c", "echo up; exec sleep 6000")
    chunks = world.transport.stream(world.runtime.log(ref, follow=True))
    assert next(chunks) == b"up\n"
    assert follow_pids(world, ref.name)
    chunks.close()  # type: ignore[attr-defined]
    wait_until(lambda: not follow_pids(world, ref.name))
    assert world.read(ref)["phase"] == "running"


def follow_pids(world: World, name: str) -> list[int]:
    return [*world.pids("logs -f " + name, part=True), *world.pids("follow=", part=True)]


def test_output_goes_to_the_file_asked_for(world: World) -> None:
    path = f"/tmp/gpusched-output-{world.tag}-'$(x) é"
    world.sh(f"printf 'of an earlier job' >{quoted(path)}")
    ref = world.launch("sh", "-c", "echo out; echo err >&2", output=path)
    world.await_phase(ref, "exited")
    world.do(world.runtime.finish_output(ref))
    assert sorted(world.output(ref).splitlines()) == ["err", "out"]
    assert sorted(world.sh(f"cat {quoted(path)}; rm {quoted(path)}").splitlines()) == ["err", "out"]


def test_a_follower_that_comes_late_adds_nothing(world: World) -> None:
    if not world.contained:
        return  # the job writes the file itself
    path = f"/tmp/gpusched-late-{world.tag}"
    ref = world.launch("sh", "-c", "echo out", output=path)
    world.await_phase(ref, "exited")
    world.do(world.runtime.finish_output(ref))
    # as if the one that was started had not come so far yet
    world.sh(f"cd {world.folder(ref)} && rm output.pid output.done && : >{path}")
    world.do(world.runtime.finish_output(ref))
    world.sh(f"sh {world.folder(ref)}/launch follow")
    assert world.sh(f"cat {path}; rm {path}") == "out\n"


def test_output_of_a_gang_goes_to_its_file(world: World) -> None:
    path = f"/tmp/gpusched-gang-{world.tag}"
    ref = world.launch("sh", "-c", "echo out", output=path, hold=True)
    world.await_phase(ref, "ready")
    world.do(world.runtime.start(ref))
    world.await_phase(ref, "exited")
    world.do(world.runtime.finish_output(ref))
    assert world.sh(f"cat {path}; rm {path}") == "out\n"


def test_an_output_that_is_a_pipe_without_reader_blocks_nothing(world: World) -> None:
    """Its user would keep a GPU without a limit, or the node's few threads for operations for minutes."""
    path = f"/tmp/gpusched-output-{world.tag}"
    world.sh(f"mkfifo {path}")
    for number, option in enumerate(("output", "error")):
        attempt, _ = world.finish("true", job=f"job{number}", **{option: path})
        assert (attempt["phase"], path in attempt["error"]) == ("failed", True)
    world.sh(f"rm {path}")
    ref = world.launch("true", job="job2", output=path, hold=True)
    world.await_phase(ref, "ready")
    world.sh(f"rm {path}; mkfifo {path}")
    world.do(world.runtime.start(ref))
    if world.contained:  # a process opens its output itself, and waits at its own expense
        world.await_phase(ref, "exited")
        assert world.run(world.runtime.finish_output(ref)).exit_code == 1
    world.sh(f"rm {path}")
    _, output = world.finish("echo", "out", job="job3", output="/dev/null")
    assert output in ("", "out\n"), "engines keep it besides"


def test_pipes_in_a_job_s_folder_block_nothing(world: World) -> None:
    script = 'cd "$GPUSCHED_JOB_DIR" && mkfifo answer.part resize.json.part && echo made; exec sleep 4246'
    ref = world.launch("sh", "-c", script)
    wait_until(lambda: world.output(ref) == "made\n")
    assert world.run(write_answer(ref, "1-1 0")).exit_code == 1
    world.do(world.runtime.signal(ref, "KILL", '{"gpus": 2}'))
    world.await_phase(ref, "exited")


def test_an_output_that_cannot_be_written_fails_the_launch(world: World) -> None:
    ref = world.launch("sh", "-c", "echo ran >/tmp/gpusched-ran", output="/nowhere/at/all")
    attempt = world.await_phase(ref, "failed")
    assert "cannot write the output file /nowhere/at/all" in attempt["error"]
    assert world.listed_sh()[0][ref.name] == attempt


def test_secrets_are_seen_by_the_job_only(world: World) -> None:
    value = "hush-4d9a1"
    ref = world.launch("sh", "-c", "echo ${#TOKEN}; sleep 6000", secrets={"TOKEN": value}, env={"OPEN": "open-4d9a1"})
    wait_until(lambda: world.output(ref) == f"{len(value)}\n")
    commands = world.sh("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    assert value not in commands
    assert world.sh(f"cd {world.folder(ref)} && grep -r -l -e hush-4d9a1 . || echo none") == "none\n"
    assert world.sh(f"cd {world.folder(ref)} && grep -r -l -e open-4d9a1 . || echo none") in ("./launch\n", "./env\n")
    assert value.encode() in world.runtime.launch(world.request("true", secrets={"TOKEN": value})).stdin


def test_the_job_knows_its_name_and_its_hostfile(world: World) -> None:
    hosts = "node-a slots=8\nnode-b slots=8"
    script = 'echo "$GPUSCHED_CONTAINER"; cat "$GPUSCHED_HOSTFILE"'
    _, output = world.finish("sh", "-c", script, hostfile=hosts)
    assert output == f"{world.request().name}\n{hosts}\n"


def test_the_workdir_and_a_missing_one(world: World) -> None:
    _, output = world.finish("pwd", workdir="/proc")
    assert output == "/proc\n"


@pytest.mark.parametrize("how", ["exec", "exec-fails"])
def test_exec_runs_beside_the_job(world: World, how: str) -> None:
    ref = world.launch("sleep", "6000", env={"MINE": "a'b c"})
    world.await_phase(ref, "running")
    code = 0 if how == "exec" else 9
    argv = world.runtime.exec_argv(ref, ("sh", "-c", f'echo "$MINE" "$1"; exit {code}', "sh", "x'y $(z)"), False)
    result = world.run(RemoteScript(argv))
    assert (result.exit_code, result.stdout) == (code, b"a'b c x'y $(z)\n")


def test_a_launcher_that_is_killed_is_lost_unless_its_container_is_made(world: World) -> None:
    ref = world.launch("sleep", "6000", hold=True)
    world.await_phase(ref, "ready")
    # A container's launcher has ended by then, or ends without harm; a process's launcher is its supervisor.
    world.sh(f"read -r pid since <{world.folder(ref)}/launcher.pid; kill -s KILL -- -$pid 2>/dev/null; :")
    if world.contained:
        world.do(world.runtime.start(ref))
        world.await_phase(ref, "running")
        return
    attempt = world.await_phase(ref, "lost")
    assert attempt["error"]
    assert world.listed_sh()[0][ref.name] == attempt


def test_the_two_listers_agree(world: World) -> None:
    refs = [
        world.launch("sleep", "6000", job="runs"),
        world.launch("sleep", "6000", job="held", hold=True),
        world.launch("sh", "-c", "exit 4", job="ended"),
        world.launch("true", job="bad", output="/nowhere/x"),
    ]
    for ref, phase in zip(refs, ("running", "ready", "exited", "failed"), strict=True):
        world.await_phase(ref, phase)
    assert world.listed_sh() == (world.listed()[0], None)
    assert json.dumps(world.listed()[0])


def test_the_processes_of_a_job_are_distinguished_from_others(world: World) -> None:
    ref = world.launch("sh", "-c", "setsid sleep 4245 & env -i sleep 4246 & sleep 4247 & wait")
    names = ("sleep 4245", "sleep 4246", "sleep 4247")
    wait_until(lambda: all(world.pids(n) for n in names))
    mine = [world.pids(n)[0] for n in names]
    stranger = int(world.sh("sleep 4248 >/dev/null 2>&1 & echo $!"))
    owners = world.listed(pids=(*mine, stranger))[3]
    assert owners == dict.fromkeys(mine, ref.name) | {stranger: None}
    world.sh(f"kill {stranger}")


def test_the_version_is_reported_on_request(world: World) -> None:
    version = world.listed(version=True)[2]
    assert (version is None) == (world.name is RuntimeName.PROCESS)


def quoted(path: str) -> str:
    return shlex.quote(path)


WRITE = (
    'cd "$GPUSCHED_JOB_DIR" && echo "{\\"step\\": $1}" >part && mv part progress.json && cat kept; echo was here >kept'
)


def test_a_jobs_folder_is_found_again_by_its_next_attempt(world: World) -> None:
    job = f"folder{world.tag}"
    for attempt, output in ((1, "cat: "), (2, "was here\n")):
        name = f"gpusched-{job}-{attempt}-0"
        found, said = world.finish("sh", "-c", WRITE, "sh", str(attempt), job=job, name=name)
        assert (found["exit_code"], said[: len(output)]) == (0, output), said
        assert found["progress"]["step"] == attempt
    again = world.listed_sh()[0][f"gpusched-{job}-2-0"]["progress"]
    assert again["step"] == 2
    world.do(forget_job(AttemptRef(CLUSTER, world.node_name, f"gpusched-{job}-1-0"), job))
    _, said = world.finish("sh", "-c", WRITE, "sh", "3", job=job, name=f"gpusched-{job}-3-0")
    assert said.startswith("cat: "), said
    world.do(forget_job(AttemptRef(CLUSTER, world.node_name, f"gpusched-{job}-1-0"), job))


def test_a_program_lies_in_the_jobs_folder_and_what_it_leaves_is_read(world: World) -> None:
    job, program = f"program{world.tag}", "".join(f"{line}\n" for line in (*HOSTILE[1:15], "END_", "x" * 200_000))
    leave = 'cd "$GPUSCHED_JOB_DIR" && cat program.1.0.py && { [ "$1" != link ] || rm result.1.0; } && $2'
    for words in (("plain", "cp program.1.0.py result.1.0"), ("link", "ln -s /etc/hostname result.1.0")):
        name = f"gpusched-{job}-1-0"
        ref = world.launch("sh", "-c", leave, "sh", *words, job=job, name=name, program=program)
        assert world.await_phase(ref, "exited", "failed", "lost")["exit_code"] == 0
        assert world.output(ref).rstrip("\n") == program.rstrip("\n")
        left = world.do(result(ref, 1, 0)).rstrip("\n")
        assert left == (program.rstrip("\n") if words[0] == "plain" else "")
        assert world.do(result(ref, 1, 1)) == ""
        world.do(world.runtime.remove(ref))
    world.do(forget_job(ref, job))


def test_a_folder_on_a_shared_disk(world: World, tmp_path: Path) -> None:
    job = f"shared{world.tag}"
    found, _ = world.finish("sh", "-c", WRITE, "sh", "5", job=job, job_dirs=str(tmp_path / "dirs"))
    assert found["progress"]["step"] == 5
    assert (tmp_path / "dirs" / CLUSTER / job / "kept").read_text() == "was here\n"


def test_a_folder_that_somebody_else_put_there_is_not_used(world: World, tmp_path: Path) -> None:
    job = f"planted{world.tag}"
    (tmp_path / CLUSTER).mkdir()
    (tmp_path / CLUSTER / job).symlink_to("/etc")
    result = world.run(world.runtime.launch(world.request("true", job=job, job_dirs=str(tmp_path))))
    assert result.exit_code == 1
    assert f"cannot write to {tmp_path}/{CLUSTER}/{job}" in result.stderr.decode()
