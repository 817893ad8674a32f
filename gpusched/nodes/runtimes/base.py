"""The port behind which the container runtimes hide: scripts for a node, built without any I/O."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from gpusched.model.jobs import Mount
from gpusched.model.slices import MigSlice
from gpusched.nodes.transport import RemoteScript

RECORD = "job.json"
"""In an attempt's folder: `gpusched.model.attemptrecords.AttemptRecord`."""
LAUNCHED = "launched"
EXISTS_EXIT_CODE = 17
"""Exit code of a launch script if its name was claimed before; nothing was started by it."""


class AttemptRef(msgspec.Struct, frozen=True):
    """Which attempt on which node: the folder and the container are found by it."""

    cluster_id: str
    node: str
    name: str


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one attempt, complete.

    Attributes:
        name: `gpusched.model.jobs.container_name`.
        command: argv; empty runs the image's own (an error where there is no image).
        env: What the job shall see besides the runtime's own additions.
        secrets: Environment variables whose values must reach neither an argv nor a disk.
        gpus: NVML indices on the node, or numbers of slices (`gpusched.model.slices`).
        slices: These slices as they are on the node, in the order of ``gpus``; empty of a job with whole GPUs.
        network: The container's network mode, ``host`` for gangs.
        hold: Create only; `Runtime.start` starts it when its whole gang is ready.
        output: File on the node's filesystem, already expanded; it is truncated, unless ``append``. None keeps the
            output with the attempt.
        hostfile: Content of the file that GPUSCHED_HOSTFILE shall name, or None.
        run_as: uid and gid of the submitter in a shared installation, where the node is entered as root. Such a job
            gains no privileges: not by setuid files, nor by capabilities beyond ``capabilities``.
        allow_root: The job may run with uid 0; else its launch is refused where it would.
        capabilities: Linux capabilities, without CAP_, that a job with ``run_as`` keeps.
        program: Text of the file ``program.ATTEMPT.RANK.py`` in the job's own folder; "": there is none.
        mounts_beneath: Folders of the node beneath which the mounts' sources must lie when they are mounted, wherever
            links lead by then; None where the submitter may mount anything.
        job_dirs: Beneath which folder, on a disk that all nodes share, jobs have their own ones; None: on each node.
        spool: Files of a job with a script, by name (`gpusched.nodes.batch.spool`): ``run`` among them is then the
            program, and ``command`` its arguments.
        error: As ``output``, for stderr alone; None: it goes where stdout does.
        append: What stands in these two files stays, and the attempt's output comes behind it.
        mps_pipe: Folder of the MPS control daemon's pipes, which the job must reach; None: it has its GPUs otherwise.
        record: Content of the file `RECORD` in the attempt's folder; "": there is none.
        session: It is interactive, on a terminal, or with stdin, stdout and stderr as they are; the first who joins it
            (`gpusched.nodes.runtimes.sessions`) starts it.
    """

    name: str
    cluster_id: str
    node: str
    job_id: str
    attempt: int
    rank: int
    image: str | None = None
    command: tuple[str, ...] = ()
    workdir: str | None = None
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    program: str = ""
    mounts: tuple[Mount, ...] = ()
    gpus: tuple[int, ...] = ()
    slices: tuple[MigSlice, ...] = ()
    cores: int
    memory_mib: int
    network: str = "host"
    hold: bool = False
    output: str | None = None
    hostfile: str | None = None
    run_as: tuple[int, int] | None = None
    allow_root: bool = True
    capabilities: tuple[str, ...] = ()
    mounts_beneath: tuple[str, ...] | None = None
    job_dirs: str | None = None
    mps_pipe: str | None = None
    spool: dict[str, str] = {}
    error: str | None = None
    append: bool = False
    record: str = ""
    session: Literal["", "terminal", "pipes"] = ""

    @property
    def ref(self) -> AttemptRef:
        """The name under which the attempt is found later."""
        return AttemptRef(self.cluster_id, self.node, self.name)


class Runtime(Protocol):
    """A way to run jobs on a node. Every method builds a script; none talks to a node.

    Scripts exit 0 when what they were asked for is so, also when it was so before; their stderr says why not.
    """

    def launch(self, request: LaunchRequest) -> RemoteScript:
        """Claim the name and start a detached launcher; returns at once on the node.

        stdout is ``launched``, or ``exists`` with exit code `EXISTS_EXIT_CODE`. The probe shows how the launch
        goes on.

        Raises:
            UsageError: The request holds what cannot be passed on exactly, or safely.
        """

    def start(self, ref: AttemptRef) -> RemoteScript:
        """Start what a launch with ``hold`` made ready. At most once: what ran before is not started again."""

    def signal(self, ref: AttemptRef, signal: str, note: str | None = None) -> RemoteScript:
        """Signal the whole job, after writing ``note`` into its resize.json; KILL reaches all that it ever started."""

    def remove(self, ref: AttemptRef) -> RemoteScript:
        """End and remove everything of the attempt: launcher, processes, container, folder."""

    def log(self, ref: AttemptRef, follow: bool = False, tail_bytes: int | None = None) -> RemoteScript:
        """Return the output so far, stdout and stderr as one.

        With ``follow`` (for `Transport.stream`) it waits for the job's start where needed and ends with the job.
        """

    def finish_output(self, ref: AttemptRef) -> RemoteScript:
        """Complete the file of ``LaunchRequest.output`` after the job's end, so that it holds the whole output.

        Waits a few seconds for the follower that wrote it, and writes the file anew where the follower was lost.
        """

    def exec_argv(self, ref: AttemptRef, argv: tuple[str, ...], tty: bool) -> tuple[str, ...]:
        """Return the command that runs ``argv`` beside the job, in its environment (process runtimes: no secrets)."""
