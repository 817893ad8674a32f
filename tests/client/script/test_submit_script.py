"""Job scripts as a user hands them over: files, stdin, --wrap; what goes before what; errors with their line."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from gpusched.config.users import user_name
from gpusched.config.validate import MAX_SCRIPT_BYTES
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobSpec, Mount
from tests.cli.conftest import GPUSCHED, Site, site
from tests.client.script.scripts import INVENTORY

__all__ = ["site"]


@pytest.fixture(autouse=True)
def _inventory(site: Site) -> None:
    site.inventory.write_text(INVENTORY)


def submitted(site: Site, script: str, *words: str, name: str = "train.sh") -> JobSpec:
    (site.folder / name).write_text(script)
    site.call("submit", "--json", *words, name).ok()
    command = site.commands()[-1]
    assert isinstance(command, Submit)
    return command.spec


def refused(site: Site, script: str, *words: str) -> str:
    (site.folder / "train.sh").write_text(script)
    done = site.call("submit", *words, "train.sh")
    assert done.code == 2
    assert not site.commands()
    return done.err.removeprefix("gpusched: error: ").removesuffix("\n")


def test_the_command_line_goes_before_our_lines_and_these_before_sbatchs(site: Site) -> None:
    script = """#!/bin/sh
#GPUSCHED --time 2h --image mine:2 --env A=own --env B=own
#SBATCH --time=1:00:00
#SBATCH --job-name=theirs
#SBATCH --gres=gpu:2
#SBATCH --mem=64G
#SBATCH --export=A=theirs,C=theirs
true
"""
    spec = submitted(site, script, "-p", "gpu", "--gpus", "1", "--env", "B=typed", "-J", "typed")
    assert (spec.time_limit_s, spec.image, spec.name) == (7200, "mine:2", "typed")
    assert spec.env == {"A": "own", "B": "typed", "C": "theirs"}
    assert (spec.nodes, spec.gpus_per_node, spec.memory_mib_per_node) == (1, 1, 64 * 1024)
    assert submitted(site, script, "-p", "gpu").gpus == 2


@pytest.mark.parametrize(
    ("lines", "words", "gpus", "cores", "gib"),
    [
        (["#SBATCH --gpus-per-task=2", "#SBATCH -n 2", "#SBATCH -c 4"], ["--gpus", "2"], 2, 8, None),
        (["#SBATCH -G 2", "#SBATCH --mem-per-gpu=10G"], ["--mem", "64G"], 2, None, 64),
        (["#SBATCH -G 2", "#SBATCH --mem=10G", "#SBATCH -c 8"], ["--flavor", "whole"], 64, None, None),
        (["#GPUSCHED --flavor whole"], ["--gpus", "2", "--cpus", "3"], 2, 3, None),
        (["#GPUSCHED --mem-per-gpu 3G", "#SBATCH --mem=64G", "#SBATCH -G 2"], [], 2, None, 6),
    ],
)
def test_the_command_line_overrides_equivalent_options_of_the_script(
    site: Site, lines: list[str], words: list[str], gpus: int, cores: int | None, gib: int | None
) -> None:
    spec = submitted(site, "\n".join(["#!/bin/sh", *lines, "true"]), "-p", "gpu", *words)
    assert spec.gpus == gpus
    assert cores in (None, spec.nodes * spec.cores_per_node)
    assert gib in (None, spec.nodes * spec.memory_mib_per_node / 1024)


def test_mounts_and_secrets_are_added_by_their_target(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "own")
    (site.folder / "token").write_text("typed")
    script = "#!/bin/sh\n#GPUSCHED --gpus 1 --mount /a:/x --mount /b:/y --secret TOKEN\ntrue\n"
    spec = submitted(site, script, "-p", "gpu", "--mount", "/c:/x:ro", "--secret", "TOKEN=@token")
    assert spec.mounts == (Mount("/b", "/y"), Mount("/c", "/x", True))
    command = site.only_submit()
    assert command.secrets == {"TOKEN": "typed"}


def test_all_that_slurms_options_say_arrives(site: Site) -> None:
    first = submitted(site, "#!/bin/sh\n#GPUSCHED -p gpu --gpus 1\ntrue\n")
    assert (first.slurm_env, first.tasks_per_node, first.name) == (False, 1, "train.sh")
    other = site.only_submit().id
    script = f"""#!/bin/bash -l
#SBATCH -p gpu -G a100:2 --dependency=afterok:{other} --begin=now+2hours
#SBATCH --signal=B:USR1@300 --no-requeue --nice -x g[01-02],g05 -H
#SBATCH -a 1-9:2%3 --comment 'a # b' --chdir sub
#SBATCH --output=%x_%A_%a.out -e /logs/%j.err --reserv
true
"""
    assert "--reservation" in refused_after(site, script)
    spec = submitted(site, script.replace(" --reserv\n", "\n"))
    assert spec.gpu_types == ("A100-SXM4-80GB",)
    assert [(d.kind, d.job_id) for d in spec.dependencies] == [("afterok", other)]
    command = site.commands()[-1]
    assert isinstance(command, Submit)
    assert spec.begin_time == pytest.approx(command.time + 7200, abs=600)
    assert (spec.signal, spec.signal_before_s, spec.signal_batch) == ("USR1", 300, True)
    assert (spec.requeue, spec.nice, spec.hold) == (False, 100, True)
    assert spec.exclude == ("g01", "g02", "g05")
    assert (command.array, command.max_running) == ((1, 3, 5, 7, 9), 3)
    assert (spec.comment, spec.workdir) == ("a # b", f"{site.folder}/sub")
    assert (spec.output, spec.error) == (f"{site.folder}/sub/%x_%A_%a.out", "/logs/%j.err")


def refused_after(site: Site, script: str) -> str:
    (site.folder / "train.sh").write_text(script)
    done = site.call("submit", "train.sh")
    assert done.code == 2
    return done.err


@pytest.mark.parametrize(
    ("lines", "words", "mail", "kinds"),
    [
        (["--mail-user=a@b.org", "--mail-type=END", "--mail-type=FAIL"], (), "a@b.org", ("end", "fail")),
        (["--mail-user=a@b.org", "--mail-type=FAIL", "--mail-type=END,FAIL"], (), "a@b.org", ("end", "fail")),
        (["--mail-user=a@b.org"], (), "", ()),
        (["--mail-user=a@b.org --mail-type=NONE"], (), "", ()),
        (["--mail-type=all"], (), user_name(os.getuid()), ("begin", "end", "fail", "requeue")),
        (["--mail-type=TIME_LIMIT_90,TIME_LIMIT"], ("--mail", "c@d.org"), "c@d.org", ("fail", "limit")),
        (["--mail-type=END --mail-user=a@b.org"], ("--notify", "begin"), "a@b.org", ("begin",)),
        ([], ("--mail-type=END",), user_name(os.getuid()), ("end",)),
        ([], ("--mail-user=c@d.org",), "", ()),
        ([], ("--mail", "c@d.org"), "c@d.org", ()),
        (["--mail-user=a@b.org"], ("--mail-type=FAIL",), "a@b.org", ("fail",)),
        (["--mail-type=END"], ("--mail-user=c@d.org",), "c@d.org", ("end",)),
        (["--mail-type=END --mail-user=a@b.org"], ("--mail-type=NONE",), "", ()),
        (["--mail-user=a@b.org"], ("--mail", "c@d.org"), "c@d.org", ()),
    ],
)
def test_mail_and_its_events(site: Site, lines: list[str], words: tuple[str, ...], mail: str, kinds: list[str]) -> None:
    text = "".join(f"#SBATCH {line}\n" for line in ["-G 1", *lines])
    spec = submitted(site, f"#!/bin/sh\n{text}", "-p", "gpu", *words)
    assert (spec.mail, spec.notify) == (mail, kinds)


@pytest.mark.parametrize(
    ("lines", "words", "field", "expected"),
    [
        (["-o out.%j --chdir sub"], (), "output", "{cwd}/sub/out.%j"),
        (["-D /data -o /logs/out -e err"], (), "error", "/data/err"),
        (["-D /100%"], ("-o", "out"), "output", "/100%%/out"),
        (["-o out -D /data"], ("-D", "/mine"), "output", "/mine/out"),
        ([], ("-D", "sub", "-o", "out"), "output", "{cwd}/sub/out"),
        ([], ("--workdir", "/sub", "-o", "out"), "output", "{cwd}/out"),
        (["-o out -D /data"], ("--workdir", "/mine"), "output", "{cwd}/out"),
        (["-o out -D /data --container-workdir /in"], (), "output", "/data/out"),
        ([], ("-w", "g[01-03]"), "nodes", 3),
        (["-w g01,g02"], ("-w", "g01"), "nodes", 1),
        (['--comment="" --exclude= --reservation=""'], (), "comment", ""),
        (["-w g01,g02"], ("-w", "g[01-04]", "-N4"), "nodes", 4),
        ([], ("--nodelist", "g[01-03]"), "nodes", 1),
        (["--gres=gpu:2"], ("--gres=none",), "gpus", 0),
        (["--gpus=2"], ("--gres=none",), "gpus", 0),
        (["--gres=gpu:2", "--gres=none"], (), "gpus", 0),
        (["--gres=none --gpus=2"], (), "gpus", 2),
    ],
)
def test_sbatchs_options_mean_the_same_in_the_script_and_typed(
    site: Site, lines: list[str], words: tuple[str, ...], field: str, expected: object
) -> None:
    expected = expected.format(cwd=site.folder) if isinstance(expected, str) else expected
    text = "".join(f"#SBATCH {line}\n" for line in lines)
    assert getattr(submitted(site, f"#!/bin/sh\n{text}", "-p", "gpu", "-c2", *words), field) == expected
    if not lines:
        site.call("submit", "--json", "-p", "gpu", "-c2", *words, "--", "true").ok()
        command = site.commands()[-1]
        assert isinstance(command, Submit)
        assert getattr(command.spec, field) == expected


def test_a_nodelist_that_is_typed_names_all_nodes(site: Site) -> None:
    says = "-w names 1 node, and --nodes says 2; to allow more nodes than needed use --nodelist"
    assert refused(site, "#!/bin/sh\n", "-p", "gpu", "-N2", "-w", "g01") == says
    assert refused(site, "#!/bin/sh\n#SBATCH -N2\n", "-p", "gpu", "-w", "g01") == f"train.sh:2: #SBATCH -N2: {says}"
    says = "-w names 2 nodes, all of which the job gets, and --gpus is 1; to allow more nodes than needed use"
    assert refused(site, "#!/bin/sh\n", "-p", "gpu", "-G", "1", "-w", "g01,g02") == f"{says} --nodelist"


def test_odd_numbers_of_nodes_and_gpus_are_errors_in_words(site: Site) -> None:
    says = "expected a number of nodes, or the least and the most, such as 2-4"
    script = "#!/bin/sh\n#SBATCH -N1-" + "9" * 5000 + "\n"
    assert says in refused(site, script, "-p", "gpu", "-c2")
    said = refused(site, "#!/bin/sh\n", "-F", "whole", "-p", "cpu", "--gpus-per-node", "2")
    assert said == "0 GPUs is not a multiple of --gpus-per-node 2"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("#SBATCH --foo=3", "#SBATCH --foo=3: sbatch has no such option; take it out"),
        ("#SBATCH --gpu=3", "#SBATCH --gpu=3: may mean --gpus or --gpus-per-node or"),
        ("#SBATCH --gress=gpu:1", "#SBATCH --gress=gpu:1: sbatch has no such option; did you mean 'gres'?"),
        ("#SBATCH --nodes", "#SBATCH --nodes: missing value; expected --nodes=VALUE"),
        ("#SBATCH --hold=yes", "#SBATCH --hold=yes: takes no value; use --hold"),
        ("#SBATCH nodes=2", "#SBATCH nodes=2: not an option; quote values that contain spaces"),
        ("#SBATCH --job-name='a b", "#SBATCH: no closing quotation; close the quote"),
        ("#SBATCH --ntasks=many", "#SBATCH --ntasks=many: invalid value for '-n' / '--ntasks'"),
        ("#SBATCH -G 2 --gres=tmp:3", "#SBATCH --gres=tmp:3: the only generic resource is GPUs"),
        ("#SBATCH --time=soon", "#SBATCH --time=soon: --time: found 'soon', expected a time such as"),
        ("#SBATCH --array=5-1", "#SBATCH --array=5-1: --array: 5-1 contains no index"),
        ("#SBATCH --nodelist=g0x", "#SBATCH --nodelist=g0x: there is no node 'g0x'"),
        ("#SBATCH --nodelist=g[01-", "#SBATCH --nodelist=g[01-: invalid node list"),
        (
            "#SBATCH --mail-type=SOMETIMES",
            "#SBATCH --mail-type=SOMETIMES: 'SOMETIMES' is not supported; supported",
        ),
        ("#SBATCH --mail-type=END --mail-user=a@b@c", "#SBATCH --mail-user=a@b@c: --mail: found 'a@b@c', expected an"),
        ("#SBATCH --begin=now+2fortnights", "#SBATCH --begin=now+2fortnights: 'fortnights' is not a unit of time"),
        ("#SBATCH --begin=lunch", "#SBATCH --begin=lunch: --begin: found 'lunch', expected a time such as"),
        ("#SBATCH --exclusive=user", "#SBATCH --exclusive=user: 'user' is not supported, only whole nodes"),
        ("#SBATCH --signal=R:TERM@3", "#SBATCH --signal=R:TERM@3: R: is for overlapping reservations"),
        ("#SBATCH -G 2 --dependency=afterok:zzz", "#SBATCH --dependency=afterok:zzz: "),
        ("#GPUSCHED --gpu 3", "#GPUSCHED --gpu 3: no such option: --gpu"),
        ("#GPUSCHED --gpus 3 echo", "#GPUSCHED --gpus 3 echo: 'echo' is not an option"),
        ("#GPUSCHED --help", "#GPUSCHED --help: no such option: --help"),
        ("#GPUSCHED --wait", "#GPUSCHED --wait: no such option: --wait"),
        ("#GPUSCHED --mem lots", "#GPUSCHED --mem lots: --mem: found 'lots', expected a memory size"),
        ("#GPUSCHED --env NOT_THERE_AT_ALL", "#GPUSCHED --env NOT_THERE_AT_ALL: --env NOT_THERE_AT_ALL: no such"),
    ],
)
def test_a_directive_that_is_not_understood_is_reported_with_its_line(site: Site, line: str, says: str) -> None:
    said = refused(site, f"#!/bin/sh\n# a comment\n\n{line}\n#SBATCH --ntasks=1\ntrue\n", "-p", "gpu")
    assert said.startswith(f"train.sh:4: {says}"), said
    assert "\n" not in said


def test_a_wrong_value_is_an_error_even_if_the_command_line_overrides_it(site: Site) -> None:
    said = refused(site, "#!/bin/sh\n#SBATCH --time=soon\ntrue\n", "-p", "gpu", "-t", "1h", "-G", "1")
    assert said.startswith("train.sh:2: #SBATCH --time=soon: --time: found 'soon', expected a time such as")


def test_names_of_several_lines_are_joined_once(site: Site) -> None:
    spec = submitted(
        site, "#!/bin/sh\n#GPUSCHED --nodelist g02\n#GPUSCHED --nodelist g01,g02 -G 1\n", "-p", "gpu", "-x", "g03,g03"
    )
    assert (spec.nodelist, spec.exclude) == (("g02", "g01"), ("g03",))


@pytest.mark.parametrize(
    ("partitions", "size", "chosen"),
    [
        ("gpu,old", ["-G", "4"], "gpu"),
        ("cpu, old,gpu", ["-G", "4", "-N", "1"], "old"),
        ("cpu,old,gpu", ["-G", "8", "-N", "1"], "gpu"),
        ("old,gpu", ["-n", "4", "--gpus-per-task", "2", "-N", "1"], "gpu"),
    ],
)
def test_of_several_partitions_the_first_that_can_hold_it(
    site: Site, partitions: str, size: list[str], chosen: str
) -> None:
    assert submitted(site, "#!/bin/sh\n", "-p", partitions, *size).partition == chosen


def test_if_no_partition_can_hold_it_the_error_is_of_the_first(site: Site) -> None:
    said = refused(site, "#!/bin/sh\n", "-p", "old,gpu", "-G", "16", "-N", "1")
    assert said == "partition old has no 1 nodes that can hold the job"
    assert refused(site, "#!/bin/sh\n", "-p", "gpu,nowhere", "-G", "1").startswith("there is no partition 'nowhere'")


def test_an_error_of_several_lines_names_them(site: Site) -> None:
    script = "#!/bin/sh\n#SBATCH --nodes=3\n#SBATCH --gpus=8\n#SBATCH -J x\ntrue\n"
    said = refused(site, script, "-p", "gpu")
    assert (
        said
        == "train.sh, lines 2 (--nodes=3), 3 (--gpus=8): 8 GPUs cannot be split evenly across 3 nodes; choose another -N"  # noqa: E501
    )
    typed = refused(site, script, "-p", "gpu", "-N", "5")
    assert typed.startswith("8 GPUs cannot")


def test_a_hostile_script_cannot_draw_on_the_screen(site: Site) -> None:
    said = refused(site, "#!/bin/sh\n#SBATCH --foo\x1b[31m\ntrue\n", "-p", "gpu")
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"echo hi\n", 'train.sh:1: not a job script: its first line must begin with "#!"'),
        (b"#!/bin/sh\r\ntrue\r\n", "train.sh:1: a DOS line break"),
        (b"#!/bin/sh\ntrue\n\0", "train.sh:3: a NUL character"),
        (b"#!/bin/sh\ntrue\n\xff", "train.sh:3: a job script must be UTF-8 text"),
        (b"#!/bin/sh\n" + b"#" * MAX_SCRIPT_BYTES, f"train.sh:1: the script has more than {MAX_SCRIPT_BYTES} bytes"),
    ],
)
def test_files_that_are_no_scripts_are_refused(site: Site, content: bytes, says: str) -> None:
    (site.folder / "train.sh").write_bytes(content)
    done = site.call("submit", "-p", "gpu", "--gpus", "1", "train.sh")
    assert (done.code, done.err.startswith(f"gpusched: error: {says}")) == (2, True), done.err


def test_the_controller_takes_no_script_that_the_client_would_refuse(site: Site) -> None:
    import msgspec

    from gpusched.config.inventory import load_inventory
    from gpusched.config.validate import validate_spec
    from gpusched.errors import UsageError

    spec = submitted(site, "#!/bin/sh\n#GPUSCHED -p gpu --gpus 1\ntrue\n")
    inventory = load_inventory(site.inventory)
    validate_spec(spec, inventory)
    for change, says in (
        ({"script": "true"}, "line 1: not a job script"),
        ({"script": "#!/bin/sh\n" + "é" * MAX_SCRIPT_BYTES}, "the job script has"),
        ({"script": "#!\ud800"}, "not valid UTF-8"),
        ({"tasks_per_node": 0}, "--ntasks-per-node must be at least 1"),
        ({"tasks_per_node": 10**9}, "--ntasks-per-node is at most"),
        ({"error": "relative"}, "--error must be an absolute path"),
        ({"submit_dir": "\0"}, "NUL"),
    ):
        with pytest.raises(UsageError, match=says):
            validate_spec(msgspec.structs.replace(spec, **change), inventory)


def test_a_dry_run_says_what_it_would_be(site: Site) -> None:
    (site.folder / "train.sh").write_text("#!/bin/sh\n#SBATCH -N 2 --gpus-per-node=4 --ntasks-per-node=4 -c 8 -t 60\n")
    site.apply_inbox()
    text = site.call("submit", "-p", "gpu", "--mem-per-gpu", "16G", "--dry-run", "train.sh").ok().out
    assert "would request: 2 nodes, each 4 GPUs, 32 cores, 64G, 4 tasks, 1:00:00, in gpu" in text


def test_directives_after_the_first_command_are_ignored_with_a_note(site: Site) -> None:
    (site.folder / "train.sh").write_text("#!/bin/sh\n#SBATCH -G 1\nset -e\n#SBATCH -G 8\n#GPUSCHED --hold\n")
    done = site.call("submit", "-p", "gpu", "train.sh")
    assert done.code == 0
    assert done.err.splitlines()[:2] == [
        "gpusched: train.sh:4: #SBATCH after the first command has no effect, as in Slurm",
        "gpusched: train.sh:5: #GPUSCHED after the first command has no effect, as in Slurm",
    ]
    spec = site.only_submit().spec
    assert (spec.gpus, spec.hold) == (1, False)
    answer = site.call("submit", "--json", "-p", "gpu", "train.sh").ok().json
    assert [note.partition(": ")[0] for note in answer["notes"]] == ["train.sh:4", "train.sh:5"]


# -- what is a script


def test_a_program_is_a_program_and_a_script_a_script(site: Site) -> None:
    (site.folder / "train.sh").write_text("#!/bin/sh\n")
    (site.folder / "python").write_text("not a script")
    (site.folder / "x.py").write_text("#!/usr/bin/env python3\n")
    for words, script, command in (
        (["train.sh", "a b", "--json"], True, ("a b", "--json")),
        (["./train.sh"], True, ()),
        (["x.py"], True, ()),
        (["python", "x.py"], False, ("python", "x.py")),
        (["--", "train.sh", "1"], False, ("train.sh", "1")),
        (["/opt/run.bin"], False, ("/opt/run.bin",)),
        (["--", "nothere.sh"], False, ("nothere.sh",)),
        (["/bin"], False, ("/bin",)),
    ):
        site.call("submit", "--json", "-p", "gpu", "--gpus", "1", *words).ok()
        found = site.commands()[-1]
        assert isinstance(found, Submit)
        assert (found.spec.script is not None, found.spec.command) == (script, command), words
    done = site.call("submit", "-p", "gpu", "--gpus", "1", "nothere.sh")
    assert (done.code, done.err) == (
        2, "gpusched: error: nothere.sh: No such file or directory; for a program inside the job, "
        "use -- nothere.sh\n",
    )  # fmt: skip


def test_wrap_makes_a_script(site: Site) -> None:
    site.call("submit", "--json", "-p", "gpu", "--gpus", "1", "--wrap", "hostname | tr a b").ok()
    spec = site.only_submit().spec
    assert spec.script is not None
    assert (spec.script.splitlines()[0], spec.script.splitlines()[-1]) == ("#!/bin/sh", "hostname | tr a b")
    assert (spec.name, spec.command) == ("wrap", ())
    done = site.call("submit", "-p", "gpu", "--gpus", "1", "--wrap", "a", "b")
    assert (done.code, "--wrap already gives the command" in done.err) == (2, True)


def test_a_script_from_stdin(site: Site) -> None:
    script = "#!/bin/sh\n#SBATCH -p gpu -G 2 -J piped\ntrue\n"
    for words in ([], ["-"], ["--image", "busybox"]):
        site.run("submit", "--json", *words, stdin=script).ok()
        command = site.commands()[-1]
        assert isinstance(command, Submit)
        assert (command.spec.script, command.spec.name, command.spec.gpus) == (script, "piped", 2)
    with_arguments = site.run("submit", "--json", "-", "a", "b", stdin=script).ok()
    assert next(c for c in site.commands() if c.id == with_arguments.json["id"]).spec.command == ("a", "b")  # type: ignore[union-attr]
    wrong = site.run("submit", stdin="#!/bin/sh\n#SBATCH --foo\n")
    assert (wrong.code, wrong.err.startswith("gpusched: error: stdin:2: #SBATCH --foo: ")) == (2, True)


def test_stdin_is_either_a_secret_or_a_script(site: Site) -> None:
    words = ("submit", "--json", "-p", "gpu", "--gpus", "1", "--secret", "T=-")
    site.run(*words, stdin="#!/bin/sh\n").ok()
    assert site.only_submit().secrets == {"T": "#!/bin/sh"}
    done = site.run(*words, "-", stdin="#!/bin/sh\n")
    assert (done.code, "--secret: stdin is already used for the script" in done.out) == (2, True)


def test_an_open_pipe_that_says_nothing_does_not_hold_up_an_image_of_its_own_command(site: Site) -> None:
    read, write = os.pipe()
    words = [GPUSCHED, "submit", "--json", "-p", "gpu", "--gpus", "1", "--image", "busybox"]
    done = subprocess.run(
        words, env=site.env, cwd=site.folder, stdin=read, capture_output=True, timeout=300, check=False
    )
    os.close(write)
    os.close(read)
    assert done.returncode == 0, done.stderr
    assert site.only_submit().spec.script is None


def test_without_stdin_nothing_is_read(site: Site) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{GPUSCHED} submit --json -p gpu --gpus 1 <&-"], env=site.env, cwd=site.folder,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- where it starts, what it has


def test_it_starts_where_it_is_submitted_if_the_job_has_that_folder(site: Site) -> None:
    script = "#!/bin/sh\ntrue\n"
    words = ("-p", "gpu", "--gpus", "1")
    assert submitted(site, script, *words).workdir is None
    assert submitted(site, script, *words, "--mount", ".").workdir == str(site.folder)
    assert submitted(site, script, *words, "--mount", f"{site.folder.parent}").workdir == str(site.folder)
    assert submitted(site, script, *words, "--mount", ".:/w").workdir is None
    assert submitted(site, script, *words, "--mount", ".", "--workdir", "/x").workdir == "/x"
    site.inventory.write_text(INVENTORY.replace("podman", "process").replace("image:", "# "))
    assert submitted(site, script, *words).workdir == str(site.folder)
    site.call("submit", "--json", *words, "--", "true").ok()
    assert [c.spec.workdir for c in site.commands() if isinstance(c, Submit)][-1] is None


@pytest.mark.parametrize(
    ("partition", "line", "options", "expected"),
    [
        ("", "#GPUSCHED --gpus 1", (), False),
        ("", "#GPUSCHED --gpus 1 --slurm-env", (), True),
        ("", "#SBATCH -G 1", (), True),
        ("", "#SBATCH -G 1", ("--no-slurm-env",), False),
        ("    slurm_env: true\n", "#GPUSCHED --gpus 1", (), True),
        ("    slurm_env: true\n", "#GPUSCHED --gpus 1", ("--no-slurm-env",), False),
    ],
)
def test_which_jobs_get_slurms_variables(
    site: Site, partition: str, line: str, options: tuple[str, ...], expected: bool
) -> None:
    site.inventory.write_text(INVENTORY.replace("  gpu:\n", f"  gpu:\n{partition}"))
    assert submitted(site, f"#!/bin/sh\n{line}\n", "-p", "gpu", *options).slurm_env is expected


def test_show_prints_the_script_as_it_was(site: Site, tmp_path: Path) -> None:
    script = "#!/bin/sh\n#GPUSCHED -p gpu --gpus 1\n\techo 'é \x1b[31m'\ntrue"
    submitted(site, script)
    job = site.only_submit().id
    assert site.call("show", job, "--script").ok().out == script
    assert site.call("show", "--json", "--script", job).ok().json == {"script": script}
    assert "4 lines" in site.call("show", job).ok().out
    site.apply_inbox()
    assert site.call("show", job, "--script").ok().out == script
    other = site.submit("-p", "gpu", "--gpus", "1", "--", "true")
    done = site.call("show", other, "--script")
    assert (done.code, "has no script" in done.err) == (2, True)


def test_on_a_terminal_its_controls_are_escaped(site: Site) -> None:
    submitted(site, "#!/bin/sh\n#GPUSCHED -p gpu --gpus 1\n\techo '\x1b[31m'\n")
    ours, terminal = pty.openpty()
    words = [GPUSCHED, "show", site.only_submit().id, "--script"]
    subprocess.run(words, env=site.env, cwd=site.folder, stdout=terminal, timeout=300, check=True)
    os.close(terminal)
    assert os.read(ours, 4096).decode().splitlines()[-1] == "\techo '\\x1b[31m'"
    os.close(ours)


@pytest.mark.parametrize(
    ("lines", "signal"),
    [
        ("#SBATCH --signal=USR2", ("USR2", 60, False)),
        ("#SBATCH --signal=B:10@5", ("USR1", 5, True)),
        ("#GPUSCHED --signal USR2", ("USR2", None, False)),
        ("# SBATCH --signal=USR2\n##SBATCH --signal=INT\n#SBATCHES\n #SBATCH --signal=HUP", ("TERM", None, False)),
    ],
)
def test_recipient_and_time_of_a_signal(site: Site, lines: str, signal: tuple[str, int | None, bool]) -> None:
    spec = submitted(site, f"#!/bin/sh\n{lines}\n", "-p", "gpu", "--gpus", "1")
    assert (spec.signal, spec.signal_before_s, spec.signal_batch) == signal
    done = site.call("submit", "-p", "gpu", "--gpus", "1", "--signal", "B:USR1@3", "--", "true")
    assert (done.code, "--signal B: needs a job script" in done.err) == (2, True)
