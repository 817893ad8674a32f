"""The apptainer runtime: a supervised process that runs ``apptainer exec``.

It does not use apptainer instances: these daemonize, so their exit code would have to be read in another way.
"""

from __future__ import annotations

import hashlib
import re
import shlex

from gpusched.errors import UsageError
from gpusched.nodes.batch.spool import RUN, SPOOL
from gpusched.nodes.runtimes.base import LaunchRequest
from gpusched.nodes.runtimes.checks import NO_IMAGE_HINT
from gpusched.nodes.runtimes.shell import quote_all
from gpusched.nodes.runtimes.supervised import SupervisedRuntime, in_job

# An image is pulled once and kept, as container engines do. It is renamed when complete, so that no job sees a partial
# one. Nodes may share this home, so temporary names contain the host name.
_IMAGE = """\
image() { if as_user test -e "$source"; then echo "$source"; else echo "$home/.cache/gpusched/images/$digest.sif"; fi; }
prepare() {
    file=$(image) host=$(uname -n)
    ! as_user test -e "$file" || return 0
    as_user mkdir -p -- "${file%/*}" || return
    part=$file.$host.$$
    for old in $(as_user ls -- "${file%/*}"); do # left by pulls that were killed on this host
        case $old in *".sif.$host."*) [ -e "/proc/${old##*.}" ] || as_user rm -f -- "${file%/*}/$old" ;; esac
    done
    as_user env HOME="$home" apptainer pull "$part" "$uri" && as_user mv -- "$part" "$file"
}
"""


class Apptainer(SupervisedRuntime):
    """`gpusched.nodes.runtimes.base.Runtime` for apptainer 1.1 and later.

    As users of apptainer expect, the job sees its home and /tmp (without --containall: its /tmp has 64 MiB), but not
    the node's environment (--cleanenv).
    """

    name = "apptainer"
    containers = True
    prefix = "APPTAINERENV_"  # not --env, which splits values at commas and shows them to all users
    enters_workdir = False  # it is a path inside the container

    def confinement(self, request: LaunchRequest) -> tuple[str, ...]:
        """Return fewer options than other runtimes: a setuid apptainer needs privileges, and drops them for the job."""
        return ("--inh-caps", "-all")

    def program(self, request: LaunchRequest) -> str:
        """Return the shell code that runs the job (see `SupervisedRuntime.program`)."""
        image = request.image
        if image is None:
            raise UsageError("runtime apptainer needs an image", NO_IMAGE_HINT)
        uri = image if re.match(r"[a-z0-9-]+://", image) else f"docker://{image}"
        # --no-eval: $() in variables is not evaluated.
        options = ["--no-eval", "--cleanenv", *(["--nv"] if request.gpus else [])]
        options += ["--pwd", request.workdir] if request.workdir is not None else []
        if request.mps_pipe is not None:
            options += ["--mount", f"type=bind,src={request.mps_pipe},dst={request.mps_pipe}"]
        for mount in request.mounts:
            read_only = ",ro" if mount.read_only else ""
            options += ["--mount", f"type=bind,src={mount.source},dst={mount.target}{read_only}"]
        flags = quote_all(options) + ' --bind "$job_dir"'
        flags += f' --bind "$spool:{SPOOL}:ro"' if request.spool else ""
        command = (*((f"{SPOOL}/{RUN}",) if request.spool else ()), *request.command)
        verb = "exec" if command else "run"
        job = in_job(f'apptainer {verb} {flags} "$(image)" {quote_all(command)}', files=True)
        other = in_job(f'apptainer exec {flags} "$(image)" "$@"', files=False)
        return (
            f"source={shlex.quote(image)}\nuri={shlex.quote(uri)}\ndigest={hashlib.sha256(uri.encode()).hexdigest()[:24]}\n"
            f"{_IMAGE}job() {{ {job}; }}\nrun() {{ {other}; }}\n"
        )
