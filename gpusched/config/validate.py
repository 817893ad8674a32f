"""Validation of job requests. Pure: clients check before they submit, the controller again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import ge
from typing import Protocol

import msgspec

from gpusched.config.plugins import all_bare, has_containers
from gpusched.errors import UsageError
from gpusched.model import ids
from gpusched.model.images import image_error
from gpusched.model.jobs import WITHOUT_ID, Elastic, JobSpec
from gpusched.model.notices import is_address, kinds_of
from gpusched.model.readings import NodeReading
from gpusched.model.resources import Inventory, Node, Partition
from gpusched.model.slices import is_profile, most_slices
from gpusched.model.slicetables import whole_gpus
from gpusched.model.suggest import did_you_mean
from gpusched.model.topology import Topology
from gpusched.model.units import (
    MAX_DURATION_S,
    MAX_TIMESTAMP,
    amounts_of,
    count_of,
    format_duration,
    format_memory,
    gpus_of,
)

MAX_VALUE_BYTES = 120_000  # Linux takes 131,072 for one argument or variable (MAX_ARG_STRLEN), its name included
MAX_TOTAL_BYTES = 1_000_000  # of command and environment together: half of what execve takes with the usual stack
MAX_SCRIPT_BYTES = 256 * 1024  # it is read with its job in every cycle
MAX_NAME = 200
MAX_ARRAY_TASKS = 100_000
MAX_LINKS = 1000  # of a chain
MAX_PRIORITY = 1_000_000_000
MAX_COUNT = 1_000_000  # of nodes, GPUs, cores; sums over whole queues must stay within 64 bits
MAX_MEMORY_MIB = 1 << 40
MAX_DEPENDENCIES = 1000  # each is looked up in every cycle
MAX_WAITING_DEPENDENCIES = 100_000  # of a user's pending jobs together
MAX_SIZES = 1000
MAX_NAMES = 10_000  # of nodes and GPU types
SIGNALS = frozenset(
    "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT STOP TSTP TTIN TTOU URG "
    "XCPU XFSZ VTALRM PROF WINCH IO PWR SYS".split()
)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
IMAGE = re.compile(r"[A-Za-z0-9/.][^\s\x00-\x1f\x7f]{0,1023}")


def validate_spec(spec: JobSpec, inventory: Inventory) -> None:
    """Check a request against the inventory.

    Raises:
        UsageError: The first thing wrong with it, in one line.
    """
    partition = known_partition(inventory, spec.partition)
    _check_name(spec.name)
    _check_environment(spec)
    _check_texts(spec)
    _check_mounts(spec)
    _check_numbers(spec)
    # Before all that looks through the nodes for these names, or ten thousand of them would take a tenth of a second.
    check_nodes(inventory, partition, (*spec.nodelist, *spec.exclude))
    check_gpu_types(partition, spec.gpu_types)
    _check_slices(spec, inventory.engine)
    _check_image(spec, partition, inventory.settings.image_transports)
    _check_flavor(spec, partition)
    _check_bounds(spec, partition)
    _check_fits(spec, partition)
    _check_elastic(spec, partition)
    _check_placement(spec, partition)
    _check_share(spec)
    _check_notices(spec)
    _check_rack(spec, partition, inventory.topology)


def _check_notices(spec: JobSpec) -> None:
    if spec.mail and not is_address(spec.mail):
        raise UsageError(f"mail: found {spec.mail[:80]!r}, expected an address such as ada@example.org, or a user")
    try:
        kinds_of(spec.notify)
    except ValueError as error:
        raise UsageError(f"notify: unknown notice {str(error)[:40]!r}") from None


def known_partition(inventory: Inventory, name: str) -> Partition:
    """Return the partition called ``name``.

    Raises:
        UsageError: There is none.
    """
    found = inventory.partition(name)
    if found is None:
        names = [p.name for p in inventory.partitions]
        raise UsageError(f"there is no partition '{name}'{did_you_mean(name, names)}")
    return found


def check_nodes(inventory: Inventory, partition: Partition | None, names: Iterable[str]) -> None:
    """Check that every name is a node (of the partition).

    Raises:
        UsageError: One is not.
    """
    for name in names:
        node = inventory.node(name)
        if node is None:
            raise UsageError(f"there is no node '{name}'{did_you_mean(name, [n.name for n in inventory.nodes])}")
        if partition is not None and node.partition != partition.name:
            raise UsageError(f"node '{name}' is in partition {node.partition}, not in {partition.name}")


def check_gpu_types(partition: Partition, names: Iterable[str]) -> None:
    """Check that every name is the GPU type of a node of the partition.

    Raises:
        UsageError: One is not.
    """
    known = list(dict.fromkeys(node.gpu_type for node in partition.nodes if node.gpu_type))
    for name in names:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "its nodes have no gpu_type"
            raise UsageError(f"partition {partition.name} has no GPUs of type '{name}'{did_you_mean(name, known)}", has)


def check_text(what: str, text: str, limit: int = MAX_VALUE_BYTES) -> None:
    """Check that text can be a process argument or variable: no NUL, no lone surrogates, not too long.

    Raises:
        UsageError: It cannot.
    """
    if "\0" in text:
        raise UsageError(f"{what} contains a NUL character")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None
    if size > limit:
        raise UsageError(f"{what} has {size} bytes; the maximum is {limit}", "put it into a file")


class AsksForNodes(Protocol):
    """What says which nodes a job may use: a `JobSpec`, or what was typed."""

    @property
    def nodelist(self) -> tuple[str, ...]:
        """Only these; empty: all."""

    @property
    def exclude(self) -> tuple[str, ...]:
        """Not these."""

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Only with such GPUs; empty: with any."""


def usable_nodes(partition: Partition, asked: AsksForNodes) -> list[Node]:
    """Return the partition's nodes that a job with this request may use."""
    names, without, types = map(frozenset, (asked.nodelist, asked.exclude, asked.gpu_types))
    nodes = [n for n in partition.nodes if (not names or n.name in names) and n.name not in without]
    return [n for n in nodes if not types or n.gpu_type in types]


def nodes_that_hold(nodes: Iterable[Node], gpus: int, cores: int, memory_mib: int) -> int:
    """Return how many of the nodes are large enough for one part of a job."""
    return sum(n.gpus >= gpus and n.cores >= cores and n.memory_mib >= memory_mib for n in nodes)


NodeKinds = Mapping[tuple[int, int, int], int]
"""What nodes have, empty: GPUs, cores and MiB -> how many nodes have them."""


def node_kinds(nodes: Iterable[Node]) -> NodeKinds:
    """Count the kinds of nodes: few, where a job may have a thousand sizes, and a partition a thousand nodes."""
    return Counter((n.gpus, n.cores, n.memory_mib) for n in nodes)


def shape_on(kinds: NodeKinds, spec: JobSpec, gpus: int) -> JobSpec | None:
    """Return a resizable job's request for that many GPUs on the fewest of such nodes, empty; None: impossible.

    Of ranges of cores and memory it has what goes with its GPUs, or the least where no nodes have that.
    """
    assert spec.elastic is not None
    most = max((has for has, _, _ in kinds), default=0)
    counts = (n for n in spec.elastic.node_counts(gpus, sum(kinds.values())) if gpus <= n * most)
    shapes = (spec.at_size(gpus, n) for n in counts)
    for found in (amounts for asked in shapes for amounts in (asked, asked.least)):
        needs = _part_of(found)
        if sum(n for has, n in kinds.items() if all(map(ge, has, needs))) >= found.nodes:
            return found
    return None


def script_error(text: str) -> str | None:
    """Return ``LINE: what`` is wrong with a job script's text, or None."""
    if not text.startswith("#!"):
        return '1: not a job script: its first line must begin with "#!", such as #!/bin/bash'
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_SCRIPT_BYTES:
        return f"1: the script has more than {MAX_SCRIPT_BYTES} bytes; put data into separate files"
    for what, name, hint in (
        ("\r\n", "a DOS line break", "; convert it with dos2unix"),
        ("\0", "a NUL character", ""),
    ):
        if (at := text.find(what)) >= 0:
            return f"{text.count(chr(10), 0, at) + 1}: {name}{hint}"
    return None


def _check_name(name: str) -> None:
    if not name or len(name) > MAX_NAME:
        raise UsageError(f"a job name has 1 to {MAX_NAME} characters, this one has {len(name)}")
    if not name.isprintable():
        raise UsageError("a job name is one line of printable characters", f"found {name[:80]!r}")


def _check_texts(spec: JobSpec) -> None:
    for number, word in enumerate(spec.command):
        check_text(f"word {number + 1} of the command", word)
    total = sum(len(w.encode()) for w in spec.command)
    for name, value in spec.env.items():
        check_text(f"the value of --env {name[:80]}", value)
        total += len(name) + len(value.encode())
    if total > MAX_TOTAL_BYTES:
        raise UsageError(
            f"command and environment have {total} bytes together; the maximum is {MAX_TOTAL_BYTES}",
            "put them into a file",
        )
    check_text("--comment", spec.comment)
    check_text("the function's name", spec.function, MAX_NAME)
    if not spec.function.isprintable():
        raise UsageError("the function's name contains unprintable characters")
    if spec.script is not None:
        check_text("the job script", spec.script, MAX_SCRIPT_BYTES)
        if error := script_error(spec.script):
            raise UsageError(f"the job script, line {error}")
    for option, path in (
        ("--workdir", spec.workdir), ("--output", spec.output), ("--error", spec.error),
        ("the folder it is submitted from", spec.submit_dir or None),
    ):  # fmt: skip
        if path is not None:
            check_text(option, path, 4000)
            if not path.startswith("/") or "\n" in path or "\r" in path:
                raise UsageError(f"{option} must be an absolute path on one line", f"found {path[:80]!r}")


def _check_environment(spec: JobSpec) -> None:
    for name in (*spec.env, *spec.secret_names):
        if not VARIABLE.fullmatch(name):
            raise UsageError(f"{name[:80]!r} is not a name for an environment variable")
    if both := set(spec.env) & set(spec.secret_names):
        raise UsageError(f"{min(both)} is given with --env and with --secret", "give it once")
    if len(set(spec.secret_names)) != len(spec.secret_names):
        raise UsageError("a secret is given twice")


def _check_mounts(spec: JobSpec) -> None:
    targets = set()
    for mount in spec.mounts:
        for path in (mount.source, mount.target):
            check_text("--mount", path, 4000)
            if not path.startswith("/") or any(c in path for c in ':,"') or not path.isprintable():
                raise UsageError("--mount needs absolute paths without ':', ',' and quotes", f"found {path[:80]!r}")
            if ".." in path.split("/"):
                raise UsageError("--mount needs paths without '..'", f"found {path[:80]!r}")
        if mount.target in targets:
            raise UsageError(f"--mount: two mounts at {mount.target}")
        targets.add(mount.target)


def _check_numbers(spec: JobSpec) -> None:
    # No number that fails here is shown: it may have millions of digits.
    for option, value, most in (
        ("--nodes", spec.nodes, MAX_COUNT),
        ("--gpus", spec.gpus_per_node, MAX_COUNT),
        ("--cpus", spec.cores_per_node, MAX_COUNT),
        ("--mem (MiB)", spec.memory_mib_per_node, MAX_MEMORY_MIB),
        ("--time (s)", spec.time_limit_s, MAX_DURATION_S),
        ("--ntasks-per-node", spec.tasks_per_node, MAX_COUNT),
        ("--gpus-per-task", spec.gpus_per_task, MAX_COUNT),
        ("--mem-per-cpu (MiB)", spec.memory_mib_per_cpu, MAX_MEMORY_MIB),
        ("--signal NAME@SECONDS", spec.signal_before_s or 0, MAX_DURATION_S),
        ("the number of --dependency", len(spec.dependencies), MAX_DEPENDENCIES),
        ("the number of --nodelist", len(spec.nodelist), MAX_NAMES),
        ("the number of --exclude", len(spec.exclude), MAX_NAMES),
        ("the number of --gpu-type", len(spec.gpu_types), MAX_NAMES),
    ):
        if value > most:
            raise UsageError(f"{option} is at most {most}")
    for option, names in (
        ("--nodelist", spec.nodelist), ("--exclude", spec.exclude), ("--gpu-type", spec.gpu_types),
    ):  # fmt: skip
        if len(set(names)) < len(names):
            raise UsageError(f"{option} has a name twice", "give each once")
    if spec.begin_time is not None and not 0 <= spec.begin_time <= MAX_TIMESTAMP:
        raise UsageError("--begin must be between the years 1970 and 3000")
    if spec.nodes < 1 or spec.gpus_per_node < 0 or spec.cores_per_node < 1 or spec.memory_mib_per_node < 1:
        raise UsageError("a job needs at least 1 node, 0 GPUs, 1 core and 1 MiB on each")
    if spec.session is not None and spec.session < 1:
        raise UsageError("an interactive job must be kept for at least a second")
    if spec.tasks_per_node < 1 or spec.gpus_per_task < 0:
        raise UsageError("--ntasks-per-node must be at least 1")
    if spec.time_limit_s < 1:
        raise UsageError("--time must be greater than zero")
    if abs(spec.priority) > MAX_PRIORITY or abs(spec.nice) > MAX_PRIORITY:
        raise UsageError(f"--priority and --nice must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    if spec.signal not in SIGNALS:
        raise UsageError(f"there is no signal {spec.signal!r}{did_you_mean(spec.signal, sorted(SIGNALS))}")
    if spec.signal_before_s is not None and not 0 < spec.signal_before_s:
        raise UsageError("--signal NAME@SECONDS: the seconds must be greater than zero")
    for dependency in spec.dependencies:
        if dependency.kind in WITHOUT_ID and not dependency.job_id:
            continue
        base, _, index = dependency.job_id.partition("_")
        if not ids.is_job_id(base) or not ids.is_prefix(dependency.job_id) or ("_" in dependency.job_id and not index):
            raise UsageError(f"--dependency: {dependency.job_id[:40]!r} is not a job id")


def _check_image(spec: JobSpec, partition: Partition, transports: tuple[str, ...]) -> None:
    here = f"partition {partition.name}"
    runtimes = {node.runtime for node in usable_nodes(partition, spec)}
    bare = all_bare(runtimes)
    if spec.image is not None:
        check_text("--image", spec.image, 4000)
        if not IMAGE.fullmatch(spec.image):
            raise UsageError(
                "--image must be one word such as docker.io/library/python:3.12", f"found {spec.image[:80]!r}"
            )
        if bare:
            raise UsageError(f"{here} runs jobs without containers; --image does not apply", "omit it")
        if error := image_error(spec.image, runtimes, transports):
            raise UsageError(error)
    elif bare and spec.mounts:
        raise UsageError(f"{here} runs jobs without containers; --mount does not apply", "omit it")
    elif any(map(has_containers, runtimes)) and partition.default_image is None:
        raise UsageError(f"{here} runs containers and has no default image", "choose one with --image")
    if not spec.command and spec.script is None and not all(map(has_containers, runtimes)):
        raise UsageError(
            "nothing to run: the command is missing", "gpusched submit ... -- COMMAND ARG..., or a job script"
        )
    if spec.command and not spec.command[0] and spec.script is None:
        raise UsageError("nothing to run: the command is ''", "gpusched submit ... -- COMMAND ARG...")


def _check_flavor(spec: JobSpec, partition: Partition) -> None:
    if spec.flavor is None:
        return
    flavor = partition.flavor(spec.flavor)
    if flavor is None:
        names = [f.name for f in partition.flavors]
        raise UsageError(f"partition {partition.name} has no flavor '{spec.flavor}'{did_you_mean(spec.flavor, names)}")
    cores, memory_mib = spec.nodes * spec.cores_per_node, spec.nodes * spec.memory_mib_per_node
    same = (spec.gpus, spec.profile) == (flavor.gpus, flavor.profile)
    if not same or cores > flavor.cores or memory_mib > flavor.memory_mib:
        raise UsageError(
            f"flavor {flavor.name} has {amounts_of(flavor.gpus, flavor.cores, flavor.memory_mib, flavor.profile)}; "
            f"requested: {amounts_of(spec.gpus, cores, memory_mib, spec.profile)}"
        )
    _check_time(spec, flavor.time_limit_s, f"flavor {flavor.name}")


def _check_time(spec: JobSpec, most: int, of: str) -> None:
    if spec.time_limit_s > most:
        asked = format_duration(spec.time_limit_s)
        raise UsageError(f"--time {asked} exceeds the maximum of {of} ({format_duration(most)})")


def _check_bounds(spec: JobSpec, partition: Partition) -> None:
    limit = max_time(partition)
    if limit is not None:
        _check_time(spec, limit, f"partition {partition.name}")
    largest = partition.largest_flavor
    if largest is None or spec.flavor is not None:
        return
    for option, asked, most in (
        ("--gpus", spec.gpus_counted, largest.gpus_counted),
        ("--cpus", spec.nodes * spec.cores_per_node, largest.cores),
        ("--mem", spec.nodes * spec.memory_mib_per_node, largest.memory_mib),
    ):
        _check_largest(partition, option, asked, most, spec.exclusive)


def _check_largest(partition: Partition, option: str, asked: float, most: float, exclusive: bool = False) -> None:
    """Refuse a request for more than the partition's largest flavor has."""
    if asked > most and partition.largest_flavor is not None:
        given, has = (format_memory(int(n)) if option == "--mem" else f"{n:.10g}" for n in (asked, most))
        if given == has:  # less apart than is shown
            given, has = f"{asked} MiB", f"{most} MiB"
        whole = "--exclusive takes whole nodes, and " if exclusive else ""
        raise UsageError(
            f"{whole}{option} {given} is more than the largest flavor of partition {partition.name} has "
            f"({partition.largest_flavor.name}: {has})"
        )


def max_time(partition: Partition) -> int | None:
    """Return the partition's longest time limit: as declared, else its longest flavor's."""
    if partition.max_time_s is not None:
        return partition.max_time_s
    return max((f.time_limit_s for f in partition.flavors), default=None)


def _check_fits(spec: JobSpec, partition: Partition) -> None:
    nodes = usable_nodes(partition, spec)
    gpus = whole_gpus(spec.gpus_per_node, spec.profile)
    room = nodes_that_hold(nodes, gpus, spec.cores_per_node, spec.memory_mib_per_node)
    if room < spec.nodes:
        of = "allowed" if len(nodes) < len(partition.nodes) else f"of partition {partition.name}"
        raise UsageError(
            f"{spec.nodes} x ({amounts_of(*_part_of(spec), spec.profile)}) "
            f"does not fit: {room} of the {count_of(len(nodes), 'node')} {of} "
            f"{'is' if room == 1 else 'are'} large enough"
        )


def _part_of(spec: JobSpec) -> tuple[int, int, int]:
    return spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node


def _check_slices(spec: JobSpec, engine: str) -> None:
    if not spec.profile:
        return
    if not is_profile(spec.profile):
        raise UsageError(f"--mig: found {spec.profile[:80]!r}, expected a profile such as 1g.10gb")
    if engine == "slurm":
        raise UsageError(f"--mig {spec.profile}: with engine: slurm it is Slurm that knows the slices", "use sbatch")
    if not spec.gpus_per_node:
        raise UsageError(f"--mig {spec.profile}: the job requests no slice", f"say --gpus {spec.profile}:1")
    for used, option in (
        (spec.elastic is not None, "--resizable"), (spec.share != "", "--share"), (spec.exclusive, "--exclusive"),
    ):  # fmt: skip
        if used:
            raise UsageError(f"{option} and --mig cannot be combined: it is for whole GPUs", "omit one")


def check_slices_exist(spec: JobSpec, inventory: Inventory, readings: Mapping[str, NodeReading]) -> None:
    """Check that enough nodes have the slices that a job asks for, as far as the nodes have been read.

    Raises:
        UsageError: They have not.
    """
    if not spec.profile:
        return
    partition = known_partition(inventory, spec.partition)
    nodes = usable_nodes(partition, spec)
    has = {node.name: slices_of(readings[node.name], node) for node in nodes if node.name in readings}
    if len(has) < len(nodes) or sum(on[spec.profile] >= spec.gpus_per_node for on in has.values()) >= spec.nodes:
        return
    profiles = sorted({name for on in has.values() for name in on})
    of = "the allowed nodes have" if len(nodes) < len(partition.nodes) else f"partition {partition.name} has"
    if spec.profile not in profiles:
        hint = f"slices there: {', '.join(profiles)}" if profiles else "no GPU there is cut into MIG slices"
        raise UsageError(f"{of} no MIG slices of {spec.profile}{did_you_mean(spec.profile, profiles)}", hint)
    asked = f"{count_of(spec.nodes, 'node')} with {gpus_of(spec.gpus_per_node, spec.profile)}"
    most = max(on[spec.profile] for on in has.values())
    raise UsageError(f"{of} no {asked}", f"at most {most} on one node; use more nodes (-N), or fewer slices")


def slices_of(reading: NodeReading, node: Node) -> Counter[str]:
    """Return profile -> number of slices of it on the node; on GPUs that are cut on demand, the most there can be."""
    cuttable, found = node.cut_on_demand(), Counter[str]()
    for gpu in reading.gpus:
        if gpu.index in cuttable and gpu.mig_profiles:
            found.update({profile.name: most_slices(profile) for profile in gpu.mig_profiles})
        else:
            found.update(one.profile for one in gpu.slices)
    return found


def _check_elastic(spec: JobSpec, partition: Partition) -> None:
    elastic = spec.elastic
    if elastic is None:
        return
    sizes = elastic.sizes
    if not sizes or len(sizes) > MAX_SIZES or list(sizes) != sorted(set(sizes)) or not 1 <= sizes[0] <= MAX_COUNT:
        raise UsageError(f"--resizable takes 1 to {MAX_SIZES} sizes of at least one GPU, ascending")
    if elastic.base_gpus not in sizes or elastic.base_gpus != spec.gpus:
        raise UsageError(f"--base-gpus {elastic.base_gpus} is not one of its sizes")
    for option, value, most in (
        *(("--cpus", cores, MAX_COUNT) for cores in (elastic.base_cores, *(elastic.cores or ()))),
        *(("--mem (MiB)", mib, MAX_MEMORY_MIB) for mib in (elastic.base_memory_mib, *(elastic.memory_mib or ()))),
        ("--cooldown (s)", elastic.cooldown_s, MAX_DURATION_S),
    ):
        if not 0 <= value <= most:
            raise UsageError(f"{option} is at most {most}")
    for option, span in (("--cpus", elastic.cores), ("--mem", elastic.memory_mib)):
        if span is not None and not 1 <= span[0] <= span[1]:
            raise UsageError(f"{option} {span[0]}-{span[1]} is no range", "write the smaller number first, at least 1")
    if spec.flavor is not None:
        raise UsageError(f"flavor {spec.flavor} has a fixed size; --resizable does not apply", "say --gpus 1-8")
    if elastic.rank_gpus:
        _check_hot(spec, elastic)
    # Checked last: these depend on the partition, so that what is wrong with the request itself is named first.
    nodes = usable_nodes(partition, spec)
    rules = partition.resizable
    found = next((gpus for gpus in sizes if not rules.allow(gpus)), None)
    if found is not None:
        bounds = f"{rules.least} to {rules.most}" if rules.most is not None else f"{rules.least} or more"
        raise UsageError(
            f"--resizable: partition {partition.name} resizes jobs to {bounds} GPUs, not to {found}",
            "the limits are set in the inventory: resizable: min, max",
        )
    kinds = node_kinds(nodes)
    for gpus in sizes:
        if shape_on(kinds, spec, gpus) is None:
            raise UsageError(
                f"--resizable: {count_of(gpus, 'GPU')} cannot be split evenly across any number of nodes "
                f"of partition {partition.name}",
                "choose sizes with --sizes",
            )
    largest = partition.largest_flavor
    if largest is not None:
        _check_largest(partition, "--cpus", elastic.cores[1] if elastic.cores else 0, largest.cores)
        _check_largest(partition, "--mem", elastic.memory_mib[1] if elastic.memory_mib else 0, largest.memory_mib)
        _check_largest(partition, "--gpus", sizes[-1], largest.gpus_counted)


def _check_hot(spec: JobSpec, elastic: Elastic) -> None:
    if not 1 <= elastic.rank_gpus <= MAX_COUNT:
        raise UsageError(f"--hot: a rank has at least one GPU, not {elastic.rank_gpus}")
    if uneven := next((gpus for gpus in elastic.sizes if gpus % elastic.rank_gpus), None):
        raise UsageError(
            f"--hot: {count_of(uneven, 'GPU')} is not a multiple of {elastic.rank_gpus}, the GPUs of a rank",
            "choose other sizes, or --gpus-per-node",
        )
    for used, what in (
        (spec.script is not None, "a job script"), (bool(spec.function), "a Python function"),
        (elastic.cores is not None, "a range of --cpus"), (elastic.memory_mib is not None, "a range of --mem"),
    ):  # fmt: skip
        if used:
            raise UsageError(f"--hot and {what} cannot be combined", "resize it by restarts: omit --hot")


def _check_placement(spec: JobSpec, partition: Partition) -> None:
    wait, most = spec.placement_wait_s, spec.max_nodes
    if wait is not None and not 0 <= wait <= MAX_DURATION_S:
        raise UsageError(f"--placement-wait (s) is at most {MAX_DURATION_S}")
    if most is not None and not 1 <= most <= MAX_SIZES:
        raise UsageError(f"--max-spread: over at most {MAX_SIZES} nodes")
    if spec.max_spread == "server" and (spec.nodes > 1 or most is not None):
        raise UsageError(
            f"--max-spread server: the job needs {count_of(spec.nodes, 'node')} of partition {partition.name}"
        )
    if spec.elastic is not None and (spec.max_spread or spec.exclusive or most is not None):
        option = "--exclusive" if spec.exclusive else "--max-spread"
        raise UsageError(f"{option} and --resizable cannot be combined: the policy chooses the nodes", "omit one")
    if spec.exclusive:
        whole = (spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node)
        nodes = usable_nodes(partition, spec)
        if most is not None or sum((n.gpus, n.cores, n.memory_mib) == whole for n in nodes) < spec.nodes:
            raise UsageError(f"--exclusive: no {count_of(spec.nodes, 'node')} of exactly that size")


def _check_share(spec: JobSpec) -> None:
    memory_mib = spec.gpu_memory_mib
    if not spec.share:
        if memory_mib is not None:
            raise UsageError("--gpu-mem needs --share", "add --share pairs, or omit it")
        return
    if memory_mib is None:
        hint = "--gpu-mem 20G: its maximum use of each GPU's memory"
        raise UsageError("--share needs the job's GPU memory", hint)
    if not 1 <= memory_mib <= MAX_MEMORY_MIB:
        raise UsageError(f"--gpu-mem (MiB) must be 1 to {MAX_MEMORY_MIB}")
    if spec.exclusive:
        raise UsageError("--exclusive and --share cannot be combined", "use one of the two")
    if spec.elastic is not None:
        raise UsageError("--resizable and --share cannot be combined", "omit one")
    if spec.nodes != 1 or spec.max_nodes is not None:
        raise UsageError("--share is only for jobs on one node", "use -N 1, or omit --share")
    if not spec.gpus_per_node:
        raise UsageError("--share: the job requests no GPU", "say --gpus")


def may_share(spec: JobSpec, partition: Partition) -> bool:
    """Return whether a node that the job may use lets two jobs share a GPU."""
    return any(node.sharing for node in usable_nodes(partition, spec))


def _check_rack(spec: JobSpec, partition: Partition, topology: Topology) -> None:
    if not topology or spec.max_spread != "rack" or spec.max_nodes is not None:
        return
    racks, (slices, *other) = topology.racks(), _part_of(spec)
    parts = (whole_gpus(slices, spec.profile), *other)
    by_rack: dict[str, list[Node]] = {}
    for node in usable_nodes(partition, spec):
        by_rack.setdefault(racks.get(node.name, node.name), []).append(node)
    most = max((nodes_that_hold(nodes, *parts) for nodes in by_rack.values()), default=0)
    if most < spec.nodes:
        raise UsageError(
            f"--max-spread rack: no rack has {count_of(spec.nodes, 'large enough node')} of partition {partition.name}"
            f" (at most {most})",
            "use fewer nodes (-N), or --max-spread any",
        )


def within_rules(spec: JobSpec, inventory: Inventory) -> JobSpec:
    """Return a resizable job's request restricted to its partition's current sizes; without any it is not resized."""
    elastic = spec.elastic
    partition = inventory.partition(spec.partition) if elastic is not None else None
    if elastic is None or partition is None or all(map(partition.resizable.allow, elastic.sizes)):
        return spec
    sizes = tuple(filter(partition.resizable.allow, elastic.sizes))
    return msgspec.structs.replace(spec, elastic=msgspec.structs.replace(elastic, sizes=sizes) if sizes else None)
