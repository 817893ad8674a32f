"""The options of a job: the one table that all ways to submit are made from.

Each field of `SubmitRequest` is an option: its `JobOption` has the names and the help of the command line and the
parser of its text, its annotation is the type of the parsed value. `gpusched.cli.options` makes the parameters of
``submit`` and ``run`` from it, `gpusched.api.options` the documentation and conversion of Python's arguments,
`gpusched.client.script` merges scripts by it, and the reference is generated from all these.
"""
# No `from __future__ import annotations`: the rows are read from the annotations, and strings would be evaluated again.

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from gpusched.client import options as parse
from gpusched.client.options import Amount, ArrayTasks, WarningSignal
from gpusched.model.jobs import Dependency
from gpusched.model.notices import NoticeKind


class JobOption(NamedTuple):
    """An option besides its type and default.

    ``names``: of the command line. ``parse``: (option, text) -> value; for a repeatable one all texts. Without it the
    command line converts to the annotated type. ``complete``: the function of `gpusched.cli.complete`. ``python``: its
    documentation for Python, where that says more than ``help``.
    """

    names: str
    help: str
    parse: Callable[[str, Any], Any] | None = None
    many: bool = False
    complete: str = ""
    python: str = ""

    @property
    def long(self) -> str:
        """Return the name that errors use."""
        return next(name for name in re.split(r"[ /]", self.names) if name.startswith("--"))

    @property
    def short(self) -> str:
        """Return the letter of its short name, or ""."""
        return self.names[1] if self.names[1] != "-" else ""

    def value(self, given: Any) -> Any:
        """Return the typed value of what was given: a text (several of a repeatable option), or a switch's state.

        Raises:
            UsageError: It is invalid.
        """
        if self.parse is not None:
            return self.parse(self.long, given)
        if isinstance(given, str):
            parse.check_not_empty(self.long, given)
        return tuple(given) if self.many else given


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a job, parsed; None, "" or () if left out. Sizes are in MiB, times in seconds.

    What depends on where it is submitted is still text: ``env``, ``secret``, ``mount``, ``output``, ``error`` and the
    ids in ``dependency``. ``script``: the text of a job script, with ``command`` as its arguments.
    """

    # fmt: off
    command: tuple[str, ...] = ()
    name: Annotated[str | None, JobOption("-J --job-name", "Name; default: the program's.",
        python="Name; default: the function's or program's.")] = None
    partition: Annotated[str | None, JobOption("-p --partition", "Partition to run in.",
        complete="partitions")] = None
    flavor: Annotated[str | None, JobOption("-F --flavor", "Flavor: a declared resource bundle.",
        complete="flavors")] = None
    gpus: Annotated[tuple[int, ...] | None, JobOption("-G --gpus",
        "GPUs in total; with --resizable a range: 1-8; or MIG slices: 1g.10gb:2.", parse.sizes)] = None
    gpus_per_node: Annotated[int | None, JobOption("--gpus-per-node", "GPUs, or MIG slices, per node.",
        parse.count)] = None
    mig: Annotated[str, JobOption("--mig", "Its GPUs are MIG slices of this profile.",
        parse.mig)] = ""
    nodes: Annotated[int | None, JobOption("-N --nodes", "Nodes; default: the fewest.",
        python="Nodes; default: the fewest. A function runs once on each, or ``ntasks_per_node`` times.")] = None
    cpus: Annotated[Amount, JobOption("--cpus", "CPU cores in total; with --resizable a range: 2-12.",
        parse.cores)] = None
    mem: Annotated[Amount, JobOption("--mem", "Memory in total: 512M, 64G, 1T; with --resizable a range: 16G-64G.",
        parse.memory_or_range, python='Memory in total: ``"64G"``; a number is MiB.')] = None
    time: Annotated[int | None, JobOption("-t --time", "Limit: 90 (minutes), 2h, HH:MM:SS, D-HH:MM:SS.",
        parse.duration, python='Time limit: ``"2h"``, minutes, or a timedelta.')] = None
    image: Annotated[str | None, JobOption("--image", "Container image.")] = None
    array: Annotated[ArrayTasks | None, JobOption("-a --array", "One task per index: 0-9, 0-30:5, 1,3, 0-99%10.",
        parse.array, python='Commands only: one task per index, ``"0-9%2"``; or a range.')] = None
    dependency: Annotated[tuple[Dependency, ...], JobOption("-d --dependency",
        "afterok:ID[:ID], afterany:, afternotok:, after:, aftercorr:, singleton; comma-separated.",
        parse.dependencies, python="As ``--dependency``; or jobs, all of which must have succeeded.")] = ()
    chain: Annotated[int | None, JobOption("--chain",
        "This many jobs, one after the other, for work longer than the time limit.",
        python="Commands only: the number of jobs, each of which starts after the previous one.")] = None
    begin: Annotated[float | None, JobOption("--begin", "Do not start before: now+2h, 16:00, 2026-11-20T18:00.",
        parse.begin, python='Earliest start: ``"now+2h"`` or a datetime.')] = None
    requeue: Annotated[bool, JobOption("--requeue/--no-requeue", "Restart after a node failure.")] = True
    preemptible: Annotated[bool | None, JobOption("--preemptible/--no-preemptible",
        "It saves its work when signalled: a policy may stop it for other jobs. Default: the partition's.")] = None
    resizable: Annotated[bool | None, JobOption("--resizable/--no-resizable",
        "It saves its work when signalled and can resume on other GPU counts. Default: the partition's.")] = None
    hot: Annotated[bool, JobOption("--hot",
        "With --resizable, also as --resizable hot: ranks join and leave the running torchrun, without a restart.",
        python="With ``resizable``: ranks join and leave the running torchrun, without a restart.")] = False
    sizes: Annotated[tuple[int, ...] | None, JobOption("--sizes", "Allowed GPU counts: 1,2,4,8.",
        parse.sizes)] = None
    base_gpus: Annotated[int | None, JobOption("--base-gpus",
        "GPU count its batch size was tuned for. Default: the smallest allowed.")] = None
    batch: Annotated[Literal["fixed", "scale"] | None, JobOption("--batch",
        "fixed or scale, passed to the job (GPUSCHED_BATCH). Default: the partition's.",
        parse.one_of("fixed", "scale"))] = None
    cooldown: Annotated[int | None, JobOption("--cooldown",
        "Minimum run time before a resize. Default: the partition's.", parse.duration)] = None
    signal: Annotated[WarningSignal | None, JobOption("--signal",
        "NAME[@SECONDS]: the warning signal, and how long before the limit; B: script only.", parse.signal,
        python='``"USR1@60"``: the warning signal, and how long before the limit.')] = None
    priority: Annotated[int, JobOption("--priority", "Higher starts first (above 0: admins only).")] = 0
    nice: Annotated[int, JobOption("--nice", "Lower the priority by this.")] = 0
    env: Annotated[tuple[str, ...], JobOption("--env", "NAME=VALUE, or NAME to copy your own.", many=True,
        python="Variables of the job, or names of your own variables to copy.")] = ()
    secret: Annotated[tuple[str, ...], JobOption("--secret", "NAME (your variable), NAME=@FILE or NAME=- (stdin).",
        many=True, python="As ``env``, for values that no other user may see.")] = ()
    mount: Annotated[tuple[str, ...], JobOption("--mount", "SRC:DST[:ro].", many=True,
        python='``"SRC:DST[:ro]"``, or sources and their mount points.')] = ()
    workdir: Annotated[str | None, JobOption("--workdir", "Working directory of the command.")] = None
    output: Annotated[str | None, JobOption("-o --output",
        "File that the nodes can write; %j %A %a %x %u %n are expanded.",
        python="File that the nodes can write, in place of the collected log.")] = None
    nodelist: Annotated[tuple[str, ...], JobOption("--nodelist", "Only on these nodes.", parse.names, many=True,
        complete="nodes")] = ()
    exclude: Annotated[tuple[str, ...], JobOption("-x --exclude", "Not on these nodes.", parse.names, many=True,
        complete="nodes")] = ()
    gpu_type: Annotated[tuple[str, ...], JobOption("--gpu-type", "Only on GPUs of these types: A100,V100.",
        parse.names, many=True, complete="gpu_types")] = ()
    max_spread: Annotated[Literal["", "server", "rack", "any"], JobOption("--max-spread",
        "How far apart its GPUs may be: server, rack, any. Default: the partition's.",
        parse.one_of("server", "rack", "any"), complete="spreads")] = ""
    placement_wait: Annotated[int | None, JobOption("--placement-wait",
        "Longest wait for one rack; 0: none. Default: the policy's.", parse.duration_or_zero)] = None
    exclusive: Annotated[bool, JobOption("--exclusive", "Whole nodes, shared with no other job.")] = False
    share: Annotated[Literal["", "pairs"], JobOption("--share",
        "pairs: share its GPUs with one other job. Needs --gpu-mem.",
        parse.one_of("pairs", note=" (with one other job)"))] = ""
    gpu_mem: Annotated[int | None, JobOption("--gpu-mem", "With --share: maximum memory of each GPU: 20G.",
        parse.memory)] = None
    reservation: Annotated[str, JobOption("--reservation", "Run only in this reservation.",
        complete="reservations")] = ""
    mail: Annotated[str, JobOption("--mail", "Mail notices about the job to ADDRESS.", parse.mail)] = ""
    notify: Annotated[tuple[NoticeKind, ...], JobOption("--notify",
        "Events to notify: begin, end, fail, requeue, limit, node, idle, all. Default: end,limit,node,idle.",
        parse.notify, many=True)] = ()
    hold: Annotated[bool, JobOption("--hold", "Queue it on hold.")] = False
    comment: Annotated[str, JobOption("--comment", "A comment, shown to others.")] = ""
    group: Annotated[str, JobOption("-A --group --account", "The group of yours that is charged. Default: the first.",
        complete="groups")] = ""
    qos: Annotated[str, JobOption("-q --qos", "Its class of service.", complete="classes")] = ""
    ntasks: Annotated[int | None, JobOption("-n --ntasks", "Tasks in total, started by srun in a job script.")] = None
    ntasks_per_node: Annotated[int | None, JobOption("--ntasks-per-node", "Tasks per node. Default: one.",
        python="Tasks per node; a function is called this many times there, each in a process with its rank.")] = None
    cpus_per_task: Annotated[int | None, JobOption("-c --cpus-per-task", "Instead of --cpus: cores per task.")] = None
    cpus_per_gpu: Annotated[int | None, JobOption("--cpus-per-gpu", "Instead of --cpus: cores per GPU.")] = None
    gpus_per_task: Annotated[int | None, JobOption("--gpus-per-task", "Instead of --gpus: GPUs per task.")] = None
    mem_per_node: Annotated[int | None, JobOption("--mem-per-node",
        "Instead of --mem: memory per node; 0: all of it.", parse.memory_or_zero)] = None
    mem_per_gpu: Annotated[int | None, JobOption("--mem-per-gpu", "Instead of --mem: memory per GPU.",
        parse.memory)] = None
    mem_per_cpu: Annotated[int | None, JobOption("--mem-per-cpu", "Instead of --mem: memory per core.",
        parse.memory)] = None
    error: Annotated[str | None, JobOption("-e --error", "Like -o, for stderr. Default: the same as stdout.",
        python="Like ``output``, for stderr.")] = None
    open_mode: Annotated[Literal["append", "truncate"] | None, JobOption("--open-mode",
        "append or truncate: what a restarted job does with its -o and -e files.", parse.one_of("append", "truncate"),
        python="``append`` or ``truncate``: what a restarted job does with its output files.")] = None
    slurm_env: Annotated[bool | None, JobOption("--slurm-env/--no-slurm-env",
        "Set Slurm's variables, as for scripts. Default: the partition's.")] = None
    script: str | None = None
    # fmt: on


OPTIONS: Mapping[str, JobOption] = {
    name: hint.__metadata__[0] for name, hint in SubmitRequest.__annotations__.items() if hasattr(hint, "__metadata__")
}
"""The rows of the table, by field of `SubmitRequest`."""


def type_of(name: str) -> Any:
    """Return the type of an option's values."""
    return get_args(SubmitRequest.__annotations__[name])[0]


def default_of(name: str) -> Any:
    """Return the value of an option that was left out."""
    return getattr(_DEFAULTS, name)


_DEFAULTS = SubmitRequest()


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the typed values of what was given, by field.

    Raises:
        UsageError: The first that is invalid, in the order of the table.
    """
    given = parse.with_slices(given)
    return {name: option.value(given[name]) for name, option in OPTIONS.items() if name in given}
