"""Job scripts on one node, in every runtime: what runs, with what, what signals reach, and srun without Python."""

from __future__ import annotations

from typing import Any

from gpusched.nodes.batch.spool import StepNode, StepSettings, spool_files
from gpusched.nodes.runtimes.supervised import Process
from gpusched.nodes.transport import RemoteScript
from tests.nodes.runtimes.world import CLUSTER, World
from tests.testbed import wait_until


def spool(script: str, **settings: Any) -> dict[str, str]:
    made = StepSettings(attempt="a", rank=0, nodes=(StepNode("here", "127.0.0.1"),), **settings)
    return spool_files(script, made, None)


def test_the_script_runs_with_its_arguments(world: World) -> None:
    script = '#!/bin/sh -e\necho "$# $1 $2 $-"; echo to-stderr >&2; scontrol show hostnames; exit 7\n'
    files = spool(script)
    attempt, output = world.finish("x y", "$(z)'", spool=files, env={"SLURM_JOB_NODELIST": "a[08-10],b"})
    assert sorted(output.splitlines()) == sorted(["2 x y $(z)' e", "to-stderr", "a08", "a09", "a10", "b"])
    assert attempt["exit_code"] == 7
    commands = world.sh("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    assert "to-stderr" not in commands


SAVES = """trap 'echo saved; exit 0' {signal}
echo up
while :; do sleep 0.05; done"""
"""sh: a task that saves its work on the signal."""


def started(world: World, script: str, *lines: str, **settings: Any) -> Any:
    """Launch a script and wait until it has said these lines."""
    ref = world.launch(spool=spool("#!/bin/sh\n" + script, **settings))
    wait_until(lambda: sorted(world.output(ref).split("\n")[:-1]) == sorted(lines), what=f"{lines} to be said")
    return ref


def test_the_signal_to_end_reaches_all_of_the_script_and_is_waited_for(world: World) -> None:
    slow = SAVES.format(signal="TERM").replace("echo saved", "sleep 0.5; echo saved")
    ref = started(world, f"sh -c '{slow.replace(chr(39), chr(34))}'\necho never", "up")
    world.do(world.runtime.signal(ref, "TERM"))
    attempt = world.await_phase(ref, "exited")
    lines = [line for line in world.output(ref).splitlines() if line != "Terminated"]  # shells say so of each sleep
    assert (attempt["exit_code"], lines) == (143, ["up", "saved"])


def test_the_warning_is_for_the_steps(world: World) -> None:
    task = SAVES.format(signal="USR1").replace("'", '"')
    ref = started(world, f"srun -n2 sh -c '{task}'\necho after $?", "up", "up", warning="USR1")
    world.do(world.runtime.signal(ref, "USR1"))
    attempt = world.await_phase(ref, "exited")
    lines = world.output(ref).splitlines()
    assert [lines.count(line) for line in ("up", "saved", "after 0")] == [2, 2, 1]
    assert attempt["exit_code"] == 0


def test_the_warning_may_be_for_the_script_alone(process: World) -> None:
    script = "trap 'echo warned' USR1; srun sh -c 'echo up; sleep 6000' & wait; kill $!; wait"
    ref = started(process, script, "up", warning="USR1", warned="script")
    process.do(process.runtime.signal(ref, "USR1"))
    process.await_phase(ref, "exited")
    assert "warned" in process.output(ref)


def test_a_kill_leaves_nothing(process: World) -> None:
    ref = started(process, "srun sleep 6100 & echo up; wait", "up")
    process.do(process.runtime.signal(ref, "KILL"))
    process.await_phase(ref, "exited", "lost")
    process.do(process.runtime.remove(ref))
    wait_until(lambda: not process.pids("sleep 6100"))


def test_exit_codes_of_tasks(world: World) -> None:
    steps = ("srun -n 3 sh -c 'exit $SLURM_PROCID'", "srun false", "srun -n0 true", "srun --bcast=/x true")
    script = "".join(f"{step}; echo $?\n" for step in steps)
    attempt, output = world.finish(spool=spool("#!/bin/sh\n" + script))
    lines = output.splitlines()
    assert attempt["exit_code"] == 0
    assert [line for line in lines if line.isdigit()] == ["2", "1", "2", "2"]
    assert "srun: error: here: task 2: Exited with exit code 2" in lines
    assert next(line for line in lines if "bcast" in line).endswith("; nothing was started")


def test_a_shell_that_is_not_there_is_named(process: World) -> None:
    attempt, output = process.finish(spool=spool("#! /opt/no/bash -l\ntrue\n"))
    assert attempt["exit_code"] == 127
    assert output == "gpusched: the job script begins with #!/opt/no/bash, which is not there\n"


class Wrapped(Process):
    """Runs each command of a job under env."""

    wrapper = ("env", "MARK=a b")


def test_a_wrapper_is_around_commands_scripts_and_what_is_run_beside(process: World) -> None:
    process.runtime = Wrapped()
    assert process.finish("sh", "-c", 'echo "$MARK"')[1] == "a b\n"
    ref = process.launch("x", job="job2", spool=spool('#!/bin/sh\necho "$# $1 $MARK"; sleep 6000\n'))
    wait_until(lambda: process.output(ref) == "1 x a b\n", what="the script in its wrapper, with its own arguments")
    beside = process.runtime.exec_argv(ref, ("sh", "-c", 'echo "$MARK"'), False)
    assert process.do(RemoteScript(beside)) == "a b\n"


def test_errors_go_to_their_own_file(world: World) -> None:
    folder = world.sh("mktemp -d /tmp/errors.XXXXXX").strip()
    script = ("sh", "-c", "echo out; echo err >&2")
    for output in (None, f"{folder}/out"):
        ref = world.launch(*script, output=output, error=f"{folder}/err", job=f"job{output is None}")
        world.await_phase(ref, "exited")
        assert world.output(ref) == "out\n"
        world.do(world.runtime.finish_output(ref))
        assert world.sh(f"cat {folder}/err; rm {folder}/err") == "err\n"
    assert world.sh(f"cat {folder}/out; rm -r {folder}") == "out\n"


def test_another_users_script(world: World) -> None:
    script = "#!/bin/sh\nid -u; srun id -u; cat $GPUSCHED_HOSTFILE; stat -c %a:%u ${0%/*}/..\n"
    attempt, output = world.finish(spool=spool(script), run_as=(1234, 1234), hostfile="a slots=1")
    assert attempt["exit_code"] == 0, output
    assert output.splitlines() == ["1234", "1234", "a slots=1", "755:0" if world.contained else "700:1234"]
    world.do(world.runtime.remove(world.launched[-1]))
    assert world.sh(f"find /var/lib/gpusched-node/{CLUSTER} -name script 2>/dev/null || true") == ""
