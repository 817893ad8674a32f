"""``submit``: what is asked for arrives in the command file exactly, or is refused in one line."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import msgspec
import pytest

from gpusched.model.commands import Submit
from gpusched.model.jobs import Dependency, DependencyKind, JobSpec, JobState, Mount
from gpusched.model.units import iso_utc
from tests.cli.conftest import GPUSCHED, Site
from tests.testbed.waiting import wait_until

HOSTILE = [
    "", " ", "a b", "'", '"', "\\", "$(touch /tmp/pwned)", "`id`", "${HOME}", ";reboot", "| cat", "&", "*", "~", "!!",
    "-n", "--", "--json", "--gpus", "-h", "--help", "line\nbreak", "tab\there", "\r\n", "日本語", "🎉", "e\u0301", 
    "\x1b[31m", "x" * 119_000, "%j", "{}", "[red]", "\x7f", "\u202e",
]  # fmt: skip


def test_prints_the_id_alone_and_writes_one_command_file(site: Site) -> None:
    done = site.run("submit", "--flavor", "s-A100", "--image", "busybox", "--", "echo", "hi")
    assert done.code == 0
    assert "controller" in done.err
    assert done.err.count("\n") == 1
    command = site.only_submit()
    assert done.out == command.id + "\n"
    assert command.spec.command == ("echo", "hi")
    assert (command.spec.partition, command.spec.flavor, command.spec.image) == ("A100", "s-A100", "busybox")
    assert (command.spec.nodes, command.spec.gpus_per_node, command.spec.cores_per_node) == (1, 2, 64)
    assert (command.spec.memory_mib_per_node, command.spec.time_limit_s) == (256 * 1024, 72 * 3600)
    assert command.spec.name == "echo"
    (file,) = (site.state / "inbox/new").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_json_prints_one_value(site: Site) -> None:
    done = site.run("submit", "--json", "-F", "s-V100", "--", "true").ok()
    assert done.json == {"id": site.only_submit().id}


def test_hostile_words_arrive_exactly(site: Site) -> None:
    site.run("submit", "--json", "-F", "s-V100", "--", "prog", *HOSTILE).ok()
    assert list(site.only_submit().spec.command) == ["prog", *HOSTILE]


def test_without_dashes_the_first_word_ends_the_options(site: Site) -> None:
    site.run("submit", "-F", "s-V100", "python", "-c", "x", "--json", "--", "-J", "y")
    assert site.only_submit().spec.command == ("python", "-c", "x", "--json", "--", "-J", "y")


def test_hostile_values_of_options_arrive_exactly(site: Site) -> None:
    values = [v for v in HOSTILE if v]
    words = [w for i, v in enumerate(values) for w in ("--env", f"V{i}={v}")]
    texts = ("--comment", "'; rm -rf / #\n$(id)", "-J", "a 'b' $(c) 🎉")
    site.run("submit", "--json", "-F", "s-V100", *texts, *words, "--", "x").ok()
    spec = site.only_submit().spec
    assert spec.env == {f"V{i}": v for i, v in enumerate(values)}
    assert spec.comment == "'; rm -rf / #\n$(id)"
    assert spec.name == "a 'b' $(c) 🎉"


def test_all_options(site: Site) -> None:
    first = site.submit()
    job = site.submit(
        "-J", "train", "-p", "V100", "--gpus", "2", "--cpus", "3", "--mem", "4G", "-t", "90", "--array", "0-9:3,20%2",
        "--dependency", f"afterok:{first[:9]},afterany:{first}", "--begin", "now+2h", "--no-requeue", "--signal",
        "USR1@60", "--priority", "3", "--nice", "1", "--mount", "/data:/d:ro", "--mount", "rel:/r", "--mount", "/same",
        "--workdir", "/w", "-o", "out/%j.txt", "-x", "dgx-1v-2", "--nodelist", "dgx-1v-1", "--hold", "--comment", "hi",
        "--preemptible", "--", "run",
    )  # fmt: skip
    command = site.commands()[-1]
    assert isinstance(command, Submit)
    assert command.id == job
    spec = command.spec
    assert (spec.name, spec.partition, spec.flavor) == ("train", "V100", None)
    assert (spec.nodes, spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node) == (1, 2, 3, 4096)
    assert spec.time_limit_s == 5400
    assert (command.array, command.max_running) == ((0, 3, 6, 9, 20), 2)
    assert spec.dependencies == (
        Dependency(DependencyKind.AFTEROK, first),
        Dependency(DependencyKind.AFTERANY, first),
    )
    assert spec.begin_time == pytest.approx(command.time + 7200, abs=600)
    assert (spec.requeue, spec.signal, spec.signal_before_s) == (False, "USR1", 60)
    assert (spec.priority, spec.nice, spec.hold, spec.comment) == (3, 1, True, "hi")
    assert spec.mounts == (
        Mount("/data", "/d", True),
        Mount(f"{site.folder}/rel", "/r"),
        Mount("/same", "/same"),
    )
    assert (spec.workdir, spec.output) == ("/w", f"{site.folder}/out/%j.txt")
    assert spec.preemptible
    assert (spec.exclude, spec.nodelist) == (("dgx-1v-2",), ("dgx-1v-1",))


@pytest.mark.parametrize(
    ("partition", "options", "expected"),
    [
        ("", (), False),
        ("", ("--preemptible",), True),
        ("    preemptible: true\n", (), True),
        ("    preemptible: true\n", ("--no-preemptible",), False),
    ],
)
def test_preemptible_is_set_by_the_job_else_by_its_partition(
    site: Site, partition: str, options: tuple[str, ...], expected: bool
) -> None:
    text = site.inventory.read_text()
    site.inventory.write_text(text.replace("  V100:\n", f"  V100:\n{partition}"))
    site.submit("-p", "V100", "--gpus", "1", *options, "--", "run")
    assert site.only_submit().spec.preemptible is expected


PLACEMENT = [  # options; max_spread, max_nodes, placement_wait_s, exclusive; nodes and GPUs of each
    (("--gpus", "12"), ("", None, None, False, 2, 6)),
    (("--gpus", "12", "--max-spread", "any"), ("any", 2, None, False, 2, 6)),
    (("--gpus", "12", "-N", "2", "--max-spread", "rack"), ("rack", None, None, False, 2, 6)),
    (("--gpus", "1", "--max-spread", "any"), ("any", None, None, False, 1, 1)),
    (("--gpus", "8", "--max-spread", "server", "--placement-wait", "2h"), ("server", None, 7200, False, 1, 8)),
    (("--gpus", "2", "--placement-wait", "0"), ("", None, 0, False, 1, 2)),
    (("--exclusive",), ("", None, None, True, 1, 8)),
    (("--exclusive", "-N", "2"), ("", None, None, True, 2, 8)),
    (("--exclusive", "--gpus", "9"), None),
    (("--exclusive", "--gpus", "10"), ("", None, None, True, 2, 8)),
]


def placed(spec: JobSpec) -> tuple[object, ...]:
    own = (spec.max_spread, spec.max_nodes, spec.placement_wait_s, spec.exclusive)
    return (*own, spec.nodes, spec.gpus_per_node)


@pytest.mark.parametrize(("options", "expected"), PLACEMENT)
def test_how_far_apart(site: Site, options: tuple[str, ...], expected: tuple[object, ...] | None) -> None:
    done = site.call("submit", "-p", "A100", "--image", "x", *options, "--", "run")
    if expected is None:
        assert "cannot be split evenly across any number of nodes" in done.err
        return
    spec = site.only_submit().spec
    assert placed(spec) == expected
    assert not spec.exclusive or (spec.cores_per_node, spec.memory_mib_per_node) == (256, 1024 << 10)


def test_how_far_apart_by_the_partition(site: Site) -> None:
    text = site.inventory.read_text()
    site.inventory.write_text(text.replace("  A100:\n", "  A100:\n    placement: {max_spread: rack, wait: 1h}\n"))
    asked = ("-p", "A100", "--image", "x", "--gpus", "12")
    site.submit(*asked, "--", "run")
    site.submit(*asked, "--max-spread", "any", "--placement-wait", "2h", "--", "run")
    first, second = (command.spec for command in site.commands() if isinstance(command, Submit))
    assert placed(first) == ("rack", None, 3600, False, 2, 6), "never over more nodes unless the job says so"
    assert placed(second) == ("any", 2, 7200, False, 2, 6)
    with site.inventory.open("a") as file:
        file.write("topology: {r1: {nodes: dgx-a100-1}, r2: {nodes: dgx-a100-2}}\n")
    done = site.call("submit", *asked, "--", "run")
    assert done.code == 2
    assert "no rack has 2 large enough nodes of partition A100 (at most 1)" in done.err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--gpus", "12", "--max-spread", "server"), "--max-spread server: the job needs 2 nodes of partition A100"),
        (("--gpus", "2", "--max-spread", "town"), "--max-spread: found 'town', expected server, rack or any"),
        (("--gpus", "2", "--placement-wait", "soon"), "--placement-wait: found 'soon', expected a time"),
        (("--exclusive", "-N", "9"), "lacks 9 large enough nodes of one size"),
        (("--exclusive", "-F", "s-A100"), "--exclusive cannot be combined; use one of the two"),
        (("--exclusive", "--resizable", "--gpus", "2-4"), "--exclusive and --resizable cannot be combined"),
        (("--max-spread", "any", "--resizable", "--gpus", "2-4"), "--max-spread and --resizable cannot be combined"),
    ],
)
def test_impossible_placements_are_refused(site: Site, options: tuple[str, ...], error: str) -> None:
    done = site.call("submit", "-p", "A100", "--image", "x", *options, "--", "run")
    assert (done.code, site.commands()) == (2, [])
    assert error in done.err


SHARING = "    defaults: {gpus: 8, cores: 256, memory: 1024G, rated_power: 6.5kW, sharing: {mode: mps}}\n"
ALONE = "no node it may use shares GPUs (sharing: in the inventory), so the job gets whole GPUs"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--gpus", "1", "--share", "pairs"), "--share needs the job's GPU memory"),
        (("--gpus", "1", "--share", "all", "--gpu-mem", "2G"), "--share: found 'all', expected pairs (with one other"),
        (("--gpus", "1", "--share", "pairs", "--gpu-mem", "2 gigs"), "--gpu-mem: found '2 gigs', expected"),
        (("--gpus", "1", "--gpu-mem", "2G"), "--gpu-mem needs --share; add --share pairs"),
        (("--gpus", "0", "--cpus", "1", "--share", "pairs", "--gpu-mem", "2G"), "--share: the job requests no GPU"),
        (("--gpus", "12", "--share", "pairs", "--gpu-mem", "2G"), "--share is only for jobs on one node"),
        (
            ("--gpus", "2", "--max-spread", "any", "--share", "pairs", "--gpu-mem", "2G"),
            "--share is only for jobs on one",
        ),
        (("--exclusive", "--share", "pairs", "--gpu-mem", "2G"), "--exclusive and --share cannot be combined"),
        (
            ("--resizable", "--gpus", "1-2", "--share", "pairs", "--gpu-mem", "2G"),
            "--resizable and --share cannot be combined",
        ),
    ],
)
def test_invalid_sharing_is_refused(site: Site, options: tuple[str, ...], error: str) -> None:
    done = site.call("submit", "-p", "A100", "--image", "x", *options, "--", "run")
    assert (done.code, site.commands()) == (2, [])
    assert error in done.err
    assert done.err.count("\n") == 1


def test_a_job_that_may_share_and_a_site_that_lets_none(site: Site) -> None:
    asked = ("submit", "-p", "A100", "--image", "x", "--gpus", "1", "--share", "pairs", "--gpu-mem", "20G", "--", "run")
    done = site.call(*asked)
    assert (done.code, ALONE in done.err) == (0, True)
    text = site.inventory.read_text()
    site.inventory.write_text(text.replace("    defaults: {gpus: 8, cores: 256, memory: 1024G, rated_power: 6.5kW}\n",
                                           f"    resizable: {{max: 8, default: true}}\n{SHARING}"))  # fmt: skip
    assert ALONE not in site.call(*asked).err
    for command in site.commands():
        assert isinstance(command, Submit)
        assert (command.spec.share, command.spec.gpu_memory_mib, command.spec.elastic) == ("pairs", 20480, None)


def test_mounts_mean_nothing_without_containers(site: Site) -> None:
    done = site.call("submit", "-p", "bare", "--gpus", "1", "--mount", "/data", "--", "run")
    assert done.code == 2
    assert "without containers; --mount does not apply" in done.err


@pytest.mark.parametrize(
    ("options", "expected"),  # nodes, GPUs, cores, MiB of each
    [
        (("-F", "f-A100"), (2, 8, 256, 1024 * 1024)),
        (("-p", "A100", "--gpus", "4"), (1, 4, 128, 512 * 1024)),
        (("-p", "A100", "--gpus", "12"), (2, 6, 192, 768 * 1024)),
        (("-p", "A100", "--gpus", "4", "-N", "2"), (2, 2, 64, 256 * 1024)),
        (("-p", "A100", "--gpus-per-node", "3", "-N", "2"), (2, 3, 96, 384 * 1024)),
        (("-p", "A100", "--gpus", "6", "--gpus-per-node", "3"), (2, 3, 96, 384 * 1024)),
        (("-p", "bare", "--gpus", "9"), (3, 3, 12, 48 * 1024)),
        (("-p", "bare", "--cpus", "4"), (1, 0, 4, 16 * 1024)),
        (("-p", "bare", "--mem", "1G"), (1, 0, 1, 1024)),
        (("-p", "bare", "--cpus", "20"), (2, 0, 10, 40 * 1024)),
        (("--nodelist", "pc2", "--gpus", "1"), (1, 1, 4, 16 * 1024)),
    ],
)
def test_sizes(site: Site, options: tuple[str, ...], expected: tuple[int, ...]) -> None:
    image = () if {"bare", "pc2"} & set(options) else ("--image", "x")
    site.submit(*options, *image, "--", "run")
    spec = site.only_submit().spec
    assert (spec.nodes, spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node) == expected


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (("-F", "one"), 3600),
        (("-F", "one", "-t", "00:10:00"), 600),
        (("-p", "bare", "--gpus", "1"), 86400),
        (("-p", "bare", "--gpus", "1", "-t", "2d"), 2 * 86400),
    ],
)
def test_time_limits(site: Site, options: tuple[str, ...], limit: int) -> None:
    site.submit(*options, "--", "run")
    assert site.only_submit().spec.time_limit_s == limit


def test_secrets_travel_apart(site: Site, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("file\nvalue\n")
    site.run(
        "submit", "--json", "-F", "s-V100", "--secret", "MINE", "--secret", "FROM_FILE=@key", "--secret", "PIPED=-",
        "--", "x", stdin="piped value\n", env={"MINE": "env value"},
    ).ok()  # fmt: skip
    command = site.only_submit()
    assert command.secrets == {"MINE": "env value", "FROM_FILE": "file\nvalue", "PIPED": "piped value"}
    assert command.spec.secret_names == ("MINE", "FROM_FILE", "PIPED")
    assert command.spec.env == {}


def test_env_is_copied_by_name(site: Site) -> None:
    site.run("submit", "--json", "-F", "s-V100", "--env", "MINE", "--env", "A=", "--", "x", env={"MINE": "1=2"}).ok()
    assert site.only_submit().spec.env == {"MINE": "1=2", "A": ""}


def test_dry_run_queues_nothing(site: Site) -> None:
    done = site.run("submit", "--dry-run", "--json", "-F", "s-V100", "--", "x").ok()
    assert done.json["dry_run"] is True
    assert done.json["spec"]["gpus_per_node"] == 2
    assert done.json["reason"] == "ReqNodeNotAvail"
    assert [n["name"] for n in done.json["nodes"]] == ["dgx-1v-1", "dgx-1v-2"]
    assert "nothing was queued" in site.run("submit", "--dry-run", "-F", "s-V100", "--", "x").ok().out
    assert site.commands() == []


def test_creates_its_own_state_folder(site: Site, tmp_path: Path) -> None:
    fresh = tmp_path / "not yet" / "here"
    done = site.run("submit", "--json", "-F", "s-V100", "--", "x", env={"GPUSCHED_STATE": str(fresh)}).ok()
    assert (fresh / "inbox/new" / f"{done.json['id']}.submit").exists()


def test_wait_exits_with_the_jobs_code(site: Site) -> None:
    words = [GPUSCHED, "submit", "--wait", "-F", "s-V100", "--", "x"]
    process = subprocess.Popen(words, env=site.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    job_id = process.stdout.readline().strip()
    site.apply_inbox()
    site.start(job_id)
    site.end(job_id, JobState.FAILED, 7)
    wait_until(lambda: process.poll() is not None)
    assert process.returncode == 7
    process.stdout.close()


ERRORS = [
    ((), "no resources requested"),
    (("-F", "s-A10", "x"), "did you mean 's-A100'?"),
    (("-F", "shared", "x"), "several partitions: V100, bare; choose one with -p"),
    (("-p", "A10", "--gpus", "1", "x"), "did you mean 'A100'?"),
    (("--gpus", "1", "x"), "several partitions"),
    (("-F", "s-A100", "x"), "--image"),
    (("-F", "s-A100", "--image", "a b", "x"), "--image"),
    (("-F", "s-A100", "--image", "-v", "x"), "--image"),
    (("-F", "one"), "the command is missing"),
    (("-F", "one", "--image", "i", "x"), "without containers"),
    (("-F", "s-V100", "--gpus", "1", "x"), "--flavor s-V100 and --gpus cannot be combined"),
    (("-F", "s-V100", "-t", "73h", "x"), "exceeds the maximum of flavor s-V100"),
    (("-F", "s-V100", "-t", "soon", "x"), "--time"),
    (("-F", "s-V100", "-t", "0", "x"), "--time"),
    (("-p", "bare", "--gpus", "1", "-t", "3d", "x"), "exceeds the maximum of partition bare"),
    (("-p", "V100", "--gpus", "3", "x"), "more than the largest flavor"),
    (("-p", "V100", "--cpus", "21", "x"), "more than the largest flavor"),
    (("-p", "V100", "--mem", "129G", "x"), "more than the largest flavor"),
    (("-p", "bare", "--gpus", "5", "--mem", "1M", "-N", "1", "x"), "does not fit"),
    (("-p", "bare", "--gpus", "7", "x"), "cannot be split evenly across any number of nodes"),
    (("-p", "bare", "--gpus", "3", "-N", "2", "x"), "cannot be split"),
    (("-p", "bare", "--gpus", "-1", "x"), "--gpus"),
    (("-p", "bare", "--gpus", "1", "-N", "0", "x"), "-N"),
    (("-p", "bare", "-N", "0", "--ntasks", "4", "x"), "-N must be at least 1"),
    (("-p", "bare", "--resizable", "--hot", "--sizes", "0", "x"), "at least one GPU"),
    (("-p", "bare", "--gpus", "one", "x"), "found 'one', expected a number"),
    (("-p", "bare", "--gpus", "4", "--gpus-per-node", "3", "x"), "multiple"),
    (("-p", "bare", "--gpus", "4", "--gpus-per-node", "2", "-N", "3", "x"), "not -N 3"),
    (("-p", "bare", "--mem", "lots", "x"), "--mem"),
    (("-F", "one", "--array", "9-0", "x"), "--array"),
    (("-F", "one", "--array", "a", "x"), "--array"),
    (("-F", "one", "--array", "0-9%0", "x"), "--array"),
    (("-F", "one", "--array", "0-9999999", "x"), "--array"),
    (("-F", "one", "--dependency", "afterok:zzz", "x"), "there is no job 'zzz'"),
    (("-F", "one", "--dependency", "later:1", "x"), "--dependency"),
    (("-F", "one", "--dependency", "afterok:", "x"), "--dependency"),
    (("-F", "one", "--begin", "someday", "x"), "--begin"),
    (("-F", "one", "--signal", "FOO", "x"), "--signal"),
    (("-F", "one", "--signal", "TERM@soon", "x"), "--signal"),
    (("-F", "one", "--env", "1A=2", "x"), "not a name"),
    (("-F", "one", "--env", "NOT_THERE_AT_ALL", "x"), "no such variable"),
    (("-F", "one", "--secret", "TOKEN=hunter2", "x"), "is visible to everyone"),
    (("-F", "one", "--secret", "NOT_THERE_AT_ALL", "x"), "no such variable"),
    (("-F", "one", "--secret", "TOKEN=@/no/such", "x"), "No such file"),
    (("-F", "one", "--secret", "LD_PRELOAD=-", "x"), "LD_PRELOAD"),
    (("-F", "one", "--mount", "a:b:c:d", "x"), "--mount"),
    (("-F", "one", "--mount", "/a:b", "x"), "--mount"),
    (("-F", "one", "--mount", "/a:/b", "--mount", "/c:/b", "x"), "two mounts"),
    (("-F", "one", "--workdir", "rel", "x"), "--workdir"),
    (("-F", "one", "-J", "a\nb", "x"), "job name"),
    (("-F", "one", "-J", "", "x"), "--job-name: found '', expected a value"),
    (("-F", "one", "-J", "n" * 201, "x"), "job name"),
    (("-F", "one", "-J", "\udcff", "x"), "job name"),
    (("-F", "one", "x", "\udcff"), "not valid UTF-8"),
    (("-F", "one", "x", "y" * 125_000), "the maximum is 120000"),
    (("-F", "one", "x", *["y" * 100_000] * 11), "the maximum is 1000000"),
    (("-F", "one", "--nodelist", "pc9", "x"), "did you mean"),
    (("-F", "one", "--nodelist", "dgx-1v-1", "-p", "bare", "x"), "is in partition V100"),
    (("-F", "one", "-x", "pc1,pc2,pc3", "x"), "leave none of the nodes of partition bare; change one"),
    (("-p", "bare", "--gpus", "1", "--nodelist", "pc1", "-x", "pc1", "x"), "leave none of the nodes of partition bare"),
    (("-p", "V100", "--gpus", "1", "--exclusive", "x"), "--exclusive takes whole nodes, and --gpus 8 is more than"),
    (("-F", "one", "--secret", "A=-", "--secret", "B=-", "x"), "--secret A=-: stdin holds one secret"),
    (("-F", "one", "--", ""), "the command is ''"),
    (("-F", "one", "--batch", "scale", "x"), "--batch: the job is not resizable; add --resizable"),
    (("-F", "one", "--cooldown", "5m", "x"), "--cooldown: the job is not resizable; add --resizable"),
    (("-F", "one", "--priority", "99999999999", "x"), "--priority"),
    (("-F", "one", "--no-such-option", "x"), "no such option"),
    (("-F",), "-F"),
]


@pytest.mark.parametrize(("words", "part"), ERRORS)
def test_every_error_is_one_line(site: Site, words: tuple[str, ...], part: str) -> None:
    done = site.call("submit", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("gpusched: error: ")
    assert done.err.count("\n") == 1
    assert part in done.err
    assert "hunter2" not in done.err
    as_json = site.call("submit", "--json", *words)
    assert (as_json.code, as_json.err) == (2, "")
    assert list(as_json.json) == ["error"]
    assert part in as_json.json["error"]
    assert site.commands() == []


def test_json_of_the_jobs_own_command_is_not_ours(site: Site) -> None:
    done = site.call("submit", "-F", "nope", "x", "--json")
    assert done.out == ""
    assert done.err.startswith("gpusched: error: ")


def test_no_inventory(site: Site) -> None:
    done = site.run("submit", "-F", "one", "--", "x", env={"GPUSCHED_INVENTORY": "/no/such/file"})
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1


def test_unwritable_inbox(site: Site) -> None:
    (site.folder / "file").write_text("")
    done = site.run("submit", "-F", "one", "--", "x", env={"GPUSCHED_STATE": str(site.folder / "file" / "state")})
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1


def test_ids_never_collide(site: Site) -> None:
    found = {site.submit() for _ in range(20)}
    assert len(found) == len(os.listdir(site.state / "inbox/new")) == 20


def test_begin_accepts_a_date(site: Site) -> None:
    site.submit("-F", "one", "--begin", "2030-01-02T03:04:05Z", "--", "x")
    assert iso_utc(site.only_submit().spec.begin_time) == "2030-01-02T03:04:05.000Z"


def test_gpu_types(site: Site) -> None:
    site.inventory.write_text(
        "defaults: {runtime: process, gpus: 4, cores: 16, memory: 64G}\npartitions:\n  mixed:\n    nodes:\n"
        "      - {name: a1, gpu_type: A100}\n      - {name: v1, gpu_type: V100}\n      - {name: v2, gpu_type: V100}\n"
        "    flavors: {all: {gpus: 8, cores: 32, memory: 128G, time: 1h}}\n"
    )
    site.submit("--gpus", "8", "--gpu-type", "V100,A100", "--gpu-type", "V100", "--", "run")
    spec = site.commands()[-1].spec
    assert (spec.nodes, spec.gpu_types) == (2, ("V100", "A100"))
    for words, line in (
        (("--gpus", "1", "--gpu-type", "A10"), "has no GPUs of type 'A10'; did you mean 'A100'?; it has A100, V100"),
        (
            ("--gpus", "8", "--gpu-type", "A100"),
            "8 GPUs, 32 cores, 128G of memory cannot be split evenly across any number of nodes",
        ),
    ):
        done = site.call("submit", *words, "--", "run")
        assert done.code == 2
        assert line in done.err


@pytest.mark.skipif(os.getuid() != 0, reason="root's own jobs")
def test_root_submits_to_a_shared_installation_only_where_it_may(site: Site) -> None:
    text = site.inventory.read_text()
    site.inventory.write_text(f"settings: {{shared: true}}\n{text}")
    done = site.call("submit", "-F", "one", "--dry-run", "--", "x")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "jobs of root need settings.root_jobs" in done.err
    site.inventory.write_text(f"settings: {{shared: true, root_jobs: true}}\n{text}")
    site.submit("-F", "one", "--", "x")


def test_an_older_clients_spec_has_no_gpu_types() -> None:
    old = b'{"name":"x","partition":"p","gpus_per_node":1,"cores_per_node":1,"memory_mib_per_node":1,"time_limit_s":1}'
    assert msgspec.json.decode(old, type=JobSpec).gpu_types == ()
