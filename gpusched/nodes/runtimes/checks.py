"""Check a launch request, before anything reaches a node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpusched.config.validate import MAX_TOTAL_BYTES, MAX_VALUE_BYTES, VARIABLE
from gpusched.errors import UsageError
from gpusched.nodes.runtimes.base import AttemptRef, LaunchRequest

NO_IMAGE_HINT = "give --image, or set image in its partition of inventory.yaml"

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SIGNAL = re.compile(r"[A-Z][A-Z0-9]{1,9}|[0-9]{1,2}")

# A secret is exported where the engine's own client runs, so its name must not steer that client, the shell or libc.
_CLIENT_VARIABLES = frozenset(
    "PATH HOME USER LOGNAME SHELL PWD OLDPWD IFS ENV CDPATH TMPDIR TMP TEMP TERM TZ LANG LANGUAGE HOSTALIASES "
    "LOCALDOMAIN OPTIND OPTARG OPTERR PPID UID EUID GROUPS SHELLOPTS SHLVL HOSTNAME RANDOM SECONDS LINENO "
    "FUNCNAME DIRSTACK PS1 PS2 PS4 PROMPT_COMMAND POSIXLY_CORRECT GLOBIGNORE NSS_WRAPPER_PASSWD "
    "REGISTRY_AUTH_FILE REGISTRIES_CONFIG_PATH STORAGE_DRIVER STORAGE_OPTS NOTIFY_SOCKET LISTEN_FDS LISTEN_PID "
    "LISTEN_FDNAMES DBUS_SESSION_BUS_ADDRESS TMOUT HISTFILE NLSPATH RES_OPTIONS GCONV_PATH GETCONF_DIR "
    "MALLOC_TRACE INIT_VERSION_STDERR".split()
)
_CLIENT_PREFIXES = (
    "LD_", "LC_", "XDG_", "DOCKER_", "CONTAINER", "PODMAN_", "BUILDAH_", "LIBPOD_", "CONMON", "CRUN_", "RUNC_", "SSL_",
    "BASH", "_LIBPOD", "_CONTAINERS", "_CRIO", "_OCI", "MALLOC_", "GLIBC_", "GODEBUG", "GOGC", "GOMAXPROCS",
    "GOMEMLIMIT", "GOTRACEBACK", "GOCOVERDIR", "GOROOT",
)  # fmt: skip
_STEERING_PREFIXES = (
    *_CLIENT_PREFIXES, "GO", "APPTAINER", "SINGULARITY", "GPUSCHED_", "SSH_", "SUDO_", "KRB5", "NVIDIA_",
    "CUDA_VISIBLE", "SLURM_",
)  # fmt: skip
MAX_ENV_FILE_BYTES = 60_000
"""Of one variable in a file for --env-file: the engines read its lines into buffers of 64 KiB."""


def configures_client(name: str) -> bool:
    """Return whether a variable of this name changes the behaviour of a shell or engine client that inherits it."""
    upper = name.upper()
    return upper in _CLIENT_VARIABLES or upper.startswith(_CLIENT_PREFIXES) or upper.endswith("_PROXY")


def secret_name_error(name: str) -> str | None:
    """Return why a secret cannot be called ``name``, or None if it can."""
    if not VARIABLE.fullmatch(name):
        return "is not a name of letters, digits and _"
    upper = name.upper()
    if upper in _CLIENT_VARIABLES or upper.startswith(_STEERING_PREFIXES) or upper.endswith("_PROXY"):
        return "would affect the shell or the container engine itself; use --env, or another name"
    return None


def check_ref(ref: AttemptRef) -> None:
    """Check that each part is a plain path component.

    Raises:
        UsageError: One of the parts is not.
    """
    for what, value in (("cluster id", ref.cluster_id), ("node name", ref.node), ("container name", ref.name)):
        if not _COMPONENT.fullmatch(value):
            raise UsageError(f"{what} {value!r} is not made of letters, digits, '.', '_' and '-'")


def check_signal(signal: str) -> str:
    """Return the signal without SIG.

    Raises:
        UsageError: Not a signal's name or number.
    """
    name = signal.upper().removeprefix("SIG")
    if not _SIGNAL.fullmatch(name):
        raise UsageError(f"{signal!r} is not a signal", "use a name such as TERM, INT or USR1")
    return name


def check_request(request: LaunchRequest) -> None:
    """Check that all of it can be passed to the job exactly and safely.

    Raises:
        UsageError: What, and why.
    """
    check_ref(request.ref)
    for name in request.env:
        if not VARIABLE.fullmatch(name):
            raise UsageError(f"environment variable {name!r} is not a name of letters, digits and _")
    for name in request.secrets:
        if error := secret_name_error(name):
            raise UsageError(f"secret {name!r} {error}")
    total = 0
    for what, value in _texts(request):
        size = _encoded_size(what, value)
        total += size
        if size > MAX_VALUE_BYTES:
            raise UsageError(
                f"{what} has {size} bytes, more than the {MAX_VALUE_BYTES} that one argument may have",
                "pass a file instead",
            )
    if total > MAX_TOTAL_BYTES:
        raise UsageError(f"command and environment have {total} bytes together, more than {MAX_TOTAL_BYTES}")
    for text in request.spool.values():
        _encoded_size("the job script", text)
    if request.hostfile is not None:
        _encoded_size("the hostfile", request.hostfile)
    _encoded_size("the program", request.program)
    _check_paths(request)


def _texts(request: LaunchRequest) -> Iterator[tuple[str, str]]:
    for i, argument in enumerate(request.command):
        yield f"argument {i} of the command", argument
    for kind, values in (("environment variable", request.env), ("secret", request.secrets)):
        for name, value in values.items():
            yield f"{kind} {name}", value
    for what, text in (("the image", request.image), ("workdir", request.workdir)):
        if text is not None:
            yield what, text
    for what, text in (("output", request.output), ("error", request.error)):
        if text is not None:
            yield what, text
    yield "the network", request.network
    for mount in request.mounts:
        yield "a mount's source", mount.source
        yield "a mount's target", mount.target


def _encoded_size(what: str, value: str) -> int:
    if "\0" in value:
        raise UsageError(f"{what} contains a NUL byte")
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None


def _check_paths(request: LaunchRequest) -> None:
    for mount in request.mounts:
        for path in (mount.source, mount.target):
            if not path.startswith("/"):
                raise UsageError(f"mount path {path!r} is not absolute")
            # The engines read --mount as comma-separated values and do not agree on how to quote in them.
            if any(c in path for c in ',"\n\r'):
                raise UsageError(f"mount path {path!r} holds a comma, a quote or a line break: --mount cannot say that")
    for what, place in (("workdir", request.workdir), ("output", request.output), ("error", request.error)):
        if place is not None and not place.startswith("/"):
            raise UsageError(f"{what} {place!r} is not absolute")
    if request.image is not None and (not request.image or request.image.startswith("-")):
        raise UsageError(f"{request.image!r} is not an image")
    if not request.network or request.network.startswith("-"):
        raise UsageError(f"{request.network!r} is not a network")
