"""Every option of sbatch's manual is supported, warned about or refused as the guide's table says."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from gpusched.cli import options
from gpusched.client.script import layers, sbatch
from gpusched.client.script.lines import ScriptError
from gpusched.client.script.source import JobScript
from gpusched.config.inventory import load_inventory
from gpusched.model.units import parse_time
from tests.cli.conftest import Site, site
from tests.client.script.scripts import INVENTORY

__all__ = ["site"]

# All that `sbatch --help` and sbatch(1) of Slurm 22.05 name.
MANUAL = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous
core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
exclusive export export-file extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
gpus-per-task gres gres-flags help hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user
mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks
ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe parsable
partition power prefer priority profile propagate qos quiet reboot requeue reservation signal sockets-per-node
spread-job switches test-only thread-spec threads-per-core time time-min tmp uid usage use-min-nodes verbose version
wait wait-all-nodes wckey wrap
""".split()

# A value of each that has one, as a manual's example would: where nothing is said, "1" will do.
VALUES = {
    "begin": "16:00", "chdir": "run", "constraint": "a100", "container-image": "pytorch", "container-mounts": "/a:/b",
    "container-workdir": "/w", "dependency": "singleton", "distribution": "block", "error": "%x-%j.err",
    "exclude": "g[01-02]", "exclusive": None, "export": "ALL,X=y", "gpus": "a100:2", "gres": "gpu:a100:2",
    "input": "/dev/null", "mail-type": "END", "mail-user": "a@b.org", "mem": "10G", "mem-per-cpu": "1G",
    "mem-per-gpu": "4G", "nice": None, "nodelist": "g01", "nodes": "2-4", "open-mode": "append", "output": "%x-%j.out",
    "partition": "gpu,old", "qos": "normal", "signal": "B:USR1@60", "switches": "1@1:00", "time": "1:00:00",
    "workdir": "run", "oversubscribe": None, "get-user-env": None, "parsable": None, "propagate": None,
    "oom-kill-step": None, "resv-ports": None, "account": "lab",
}  # fmt: skip
NOTED = {"account", "qos", "nodes", "export"}  # different from sbatch: this value gives a note


@pytest.mark.parametrize("name", sorted(sbatch.OPTIONS))
def test_each_option_does_what_its_row_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    option = sbatch.OPTIONS[name]
    takes = isinstance(option, sbatch.SupportedOption) and option.value
    value = VALUES.get(name, "1") if takes else None
    line = f"#SBATCH --{name}" + ("" if value is None else f"={value}")
    script = JobScript(text=f"#!/bin/sh\n{line}\ntrue\n", where="t", name="t")
    try:
        read = layers.read_options(script, options.parse, load_inventory(tmp_path / "inventory.yaml"), "/cwd", "ada")
    except ScriptError as error:
        result, message = "refused", error.message
        assert isinstance(option, sbatch.RefusedOption), message
    else:
        assert isinstance(option, sbatch.SupportedOption)
        warned = [note for note in read.notes if "no effect" in note]
        result = "warned" if warned else option.result
        assert result == option.result
        assert bool(read.notes) == (result == "warned" or name in NOTED), read.notes
        assert (result == "warned") <= (not read.given)
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "from-slurm.md").read_text()
    table = guide.partition("sbatch-results")[2]
    cells = [[cell.strip("| ") for cell in row.split(" | ")] for row in table.splitlines() if row.startswith("| ")]
    (said,) = [does for names, does, *_ in cells if f"`--{name}`" in names.split(", ")]
    assert said == result


def test_every_option_of_the_manual_has_a_row() -> None:
    assert sorted(set(MANUAL) - sbatch.OPTIONS.keys()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gres=gpu:a100:2"], {"gpus_per_node": 2, "gpu_types": ("A100-SXM4-80GB",)}),
        (["--gpus", "a100:2", "-b", "2026-12-01T09:00"], {"gpus_per_node": 2}),
        (["-N", "2-4", "--gpus-per-node", "a100:1"], {"nodes": 2, "gpus_per_node": 1}),
        (["--export=ALL,X=y", "-G", "1", "-D", "/data", "-H"], {"env": {"X": "y"}, "workdir": "/data", "hold": True}),
        (["--hint=nomultithread", "--profile=all", "--tmp", "10G", "-G1"], {"gpus_per_node": 1}),
        (["--open-mode=append", "-o", "%x-%j", "-G1"], {"append": True}),
        (["--nodelist", "g[01-02]", "-G1", "--exclusive"], {"nodelist": ("g01", "g02"), "exclusive": True}),
        (["--nice", "-G1", "--mem-per-cpu", "1048576K", "-n", "2"], {"nice": 100, "memory_mib_per_cpu": 1024}),
        (["--mail-type=END", "-G1", "-J", "a b"], {"name": "a b"}),
    ],
)
def test_sbatchs_options_are_taken_as_typed(site: Site, words: list[str], expected: dict[str, object]) -> None:
    site.inventory.write_text(INVENTORY)
    mail = ["--mail", "a@b.org"] if any("mail-type" in word for word in words) else []
    done = site.call("submit", "-p", "gpu", *words, *mail, "--", "true", "--gres=not:ours")
    assert done.code == 0, done.err
    spec = site.only_submit().spec
    assert {name: getattr(spec, name) for name in expected} == expected
    assert spec.command == ("true", "--gres=not:ours")
    for word in words:
        if word.startswith(("--hint", "--profile", "--tmp")):
            assert f"gpusched: {word}" in done.err


def test_an_unsupported_option_is_refused_by_name(site: Site) -> None:
    site.inventory.write_text(INVENTORY)
    for words, says in (
        (["--gres=shard:2"], "--gres=shard:2: the only generic resource is GPUs"),
        (["-L", "matlab"], "-L: not supported: licenses are not counted"),
        (["--grse=gpu:1"], "no such option: --grse (Possible options: --gpus, --gres, --verbose)"),
    ):
        done = site.call("submit", "-p", "gpu", *words, "--", "true")
        assert (done.code, says in done.err.lower() or says in done.err) == (2, True), done.err
    assert not site.commands()


def test_test_only_is_a_dry_run(site: Site) -> None:
    site.inventory.write_text(INVENTORY)
    site.apply_inbox()
    assert "would" in site.call("submit", "--test-only", "-p", "gpu", "--gres=gpu:1", "--", "true").ok().out
    assert not site.commands()


def test_of_several_partitions_the_first_that_can_hold_it(site: Site) -> None:
    site.inventory.write_text(INVENTORY)
    for asked, gpus, chosen in (("old,gpu", "8", "gpu"), ("old,gpu", "4", "old"), ("cpu,old", "1", "old")):
        done = site.call("submit", "-p", asked, "--gpus-per-node", gpus, "--", "true")
        assert (done.code, site.commands()[-1].spec.partition) == (0, chosen), done.err  # type: ignore[union-attr]
        assert f"-p {asked}: queued in {chosen} only" in done.err
    for asked, says in (("cpu,old", "fit"), ("gpu,nothere", "there is no partition 'nothere'")):
        done = site.call("submit", "-p", asked, "--gpus-per-node", "8", "--", "true")
        assert done.code == 2, done.out
        assert says in done.err or "nodes that can hold" in done.err


def test_a_job_that_names_no_partition_goes_to_the_default(site: Site) -> None:
    site.inventory.write_text(INVENTORY)
    done = site.call("submit", "-G", "1", "--", "true")
    assert (done.code, "there are several partitions" in done.err) == (2, True)
    site.inventory.write_text(INVENTORY.replace("  old:\n", "  old:\n    default: true\n"))
    site.call("submit", "--json", "-G", "1", "--", "true").ok()
    assert site.only_submit().spec.partition == "old"
    site.apply_inbox()
    assert "old*" in site.call("nodes").ok().out
    assert "old*" in site.call("flavors").ok().out
    both = INVENTORY.replace("    image: ", "    default: true\n    image: ")
    site.inventory.write_text(both)
    done = site.call("submit", "-G", "1", "--", "true")
    assert "expected one default partition" in done.err


def test_submit_warns_of_mpi_that_srun_will_refuse(site: Site) -> None:
    site.inventory.write_text(INVENTORY)
    script = "#!/bin/sh\n#SBATCH -p gpu -G 1\nsrun --mpi=none a\n# srun --mpi=pmix b\nsrun -n 2 --mpi=pmix c | tee d\n"
    (site.folder / "train.sh").write_text(script)
    done = site.call("submit", "train.sh")
    assert done.code == 0
    assert [line for line in done.err.splitlines() if "mpi" in line] == [
        "gpusched: train.sh:5: srun --mpi=pmix will be refused: srun provides no PMI here; start MPI "
        "programs with mpirun, or use --mpi=none"
    ]


def test_show_fills_in_the_output_files(site: Site) -> None:
    site.inventory.write_text(INVENTORY)
    job = site.submit("-p", "gpu", "-G", "1", "-J", "ddp", "-o", "/o/%x-%j-%N", "-e", "/o/%a%%", "--", "true")
    site.apply_inbox()
    text = site.call("show", job).ok().out
    assert f"/o/ddp-{job}-%N" in text
    assert "/o/0%" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16:00", "2026-11-23T16:00:00"), ("9:30", "2026-11-24T09:30:00"), ("4:05:06pm", "2026-11-23T16:05:06"),
        ("12:00 AM", "2026-11-24T00:00:00"), ("teatime", "2026-11-23T16:00:00"), ("noon", "2026-11-24T12:00:00"),
        ("midnight", "2026-11-24T00:00:00"), ("tomorrow", "2026-11-24T00:00:00"), ("1201", "2026-12-01T00:00:00"),
        ("120127", "2027-12-01T00:00:00"), ("1/2", "2027-01-02T00:00:00"), ("12/01/26 9:00", "2026-12-01T09:00:00"),
        ("01.12.27T10:00", "2027-01-12T10:00:00"), ("2026-12-01", "2026-12-01T00:00:00"),
        ("2026-12-01T09:00", "2026-12-01T09:00:00"), ("25:00", ""), ("13:00pm", ""), ("13/13", ""),
        ("", ""), (" ", ""), ("t", ""),
    ],
)  # fmt: skip
def test_times_are_those_of_slurm(text: str, expected: str) -> None:
    now = datetime.fromisoformat("2026-11-23T15:00:00")
    if not expected:
        with pytest.raises(ValueError, match="a time such as"):
            parse_time(text, now.timestamp())
        return
    assert datetime.fromtimestamp(parse_time(text, now.timestamp())).isoformat() == expected
