"""Facts on a node beyond its GPUs: runtimes, python3, disk, home, what ends processes. For init and check.

One POSIX sh script over one SSH exec prints ``key=value`` lines between two marks; a pure parser reads them. What comes
before the first mark comes from the account's own start-up files.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec

from gpusched.model.units import whole_number
from gpusched.nodes.runtimes.shell import BOUNDED
from gpusched.nodes.transport import RemoteScript

_BEGIN, _END = "gpusched-inspection-begin", "gpusched-inspection-end"
RUN_TIMEOUT_S = 45.0  # of the whole script; each runtime is asked for at most 10 s of it


class RuntimeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One container runtime on a node.

    Attributes:
        version: As it says itself, such as ``4.3.1``.
        error: Why it does not work; "" where it does.
        disk_free_mib: Where it keeps images and containers.
        cdi: A CDI spec for nvidia.com/gpu is there.
        toolkit: The NVIDIA container toolkit is there.
        controllers: The cgroup controllers it may use, where it says so (podman).
    """

    name: str
    version: str = ""
    error: str = ""
    disk_free_mib: int | None = None
    cdi: bool = False
    toolkit: bool = False
    controllers: tuple[str, ...] | None = None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What the script found. Unknown is None.

    Attributes:
        noise: What the account's start-up files print where no one asked.
        product: The machine's name in its firmware, such as ``DGXA100 920-23687-2530-000``.
        kill_user_processes: systemd-logind ends a user's processes at logout.
        linger: The user's services outlive the logout.
        flock: util-linux's command is there.
        mps: The control daemon of MPS has its pipe in the folder asked for.
        runtimes: Those that are installed, of those asked for.
    """

    noise: str = ""
    user: str = ""
    uid: int | None = None
    home: str = ""
    home_error: str = ""
    home_free_mib: int | None = None
    python3: str | None = None
    nvidia_smi: bool = False
    product: str = ""
    kill_user_processes: bool | None = None
    linger: bool | None = None
    flock: bool = True
    mps: bool = False
    runtimes: tuple[RuntimeFacts, ...] = ()

    def runtime(self, name: str) -> RuntimeFacts | None:
        """Return the runtime called ``name``; None if it is not installed or was not asked for."""
        return next((r for r in self.runtimes if r.name == name), None)


def inspection_script(runtimes: Sequence[str], mps_pipe: str = "") -> RemoteScript:
    """Return the script that inspects a node, these container runtimes on it, and this folder of MPS pipes."""
    head = f"echo {_BEGIN}\nmps={shlex.quote(mps_pipe)}\n"
    return RemoteScript(("sh", "-s", "--", *runtimes), f"{head}{BOUNDED}{_SCRIPT}echo {_END}\n".encode())


def parse_inspection(output: bytes) -> Inspection | None:
    """Return what the script printed, as facts; None if it did not run to its end."""
    text = output.decode("utf-8", "replace")
    noise, begin, rest = text.partition(_BEGIN + "\n")
    body, end, _ = rest.partition(_END)
    if not begin or not end:
        return None
    pairs = (line.partition("=") for line in body.splitlines())
    facts = {key: value.strip() for key, _, value in pairs}
    return Inspection(
        noise=noise.strip()[:200],
        user=facts.get("user", ""),
        uid=whole_number(facts.get("uid", "")),
        home=facts.get("home", ""),
        home_error=facts.get("home_error", ""),
        home_free_mib=_mib(facts.get("home_free_kib")),
        python3=facts.get("python3") or None,
        nvidia_smi=facts.get("nvidia_smi") == "yes",
        product=facts.get("product", ""),
        kill_user_processes=_flag(facts.get("kill_user_processes")),
        linger=_flag(facts.get("linger")),
        flock=facts.get("flock") != "no",
        mps=facts.get("mps") == "yes",
        runtimes=tuple(_runtime(name, facts) for name in facts.get("runtimes", "").split()),
    )


def _runtime(name: str, facts: dict[str, str]) -> RuntimeFacts:
    controllers = facts.get(f"{name}.controllers")
    return RuntimeFacts(
        name=name,
        version=facts.get(f"{name}.version", ""),
        error=facts.get(f"{name}.error", ""),
        disk_free_mib=_mib(facts.get(f"{name}.free_kib")),
        cdi=facts.get("cdi") == "yes",
        toolkit=facts.get("toolkit") == "yes",
        controllers=tuple(controllers.strip("[]").split()) if controllers is not None else None,
    )


def _mib(text: str | None) -> int | None:
    kib = whole_number(text or "")
    return None if kib is None else kib // 1024


def _flag(text: str | None) -> bool | None:
    return {"true": True, "yes": True, "false": False, "no": False}.get(text or "")


_SCRIPT = r"""LC_ALL=C; export LC_ALL
PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
has() { command -v "$1" >/dev/null 2>&1; }
one() { tr '\n\t' '  ' | cut -c1-300; }
free() { df -Pk "$1" 2>/dev/null | awk 'NR > 1 { print $4; exit }'; }

user=$(id -un 2>/dev/null); uid=$(id -u)
echo "user=$user"
echo "uid=$uid"
echo "home=$HOME"
if why=$( { t=$(mktemp "$HOME/.gpusched-check.XXXXXX") && echo x > "$t"; r=$?; rm -f "$t"; exit $r; } 2>&1 ); then :
else echo "home_error=$(echo "${why:-cannot be written}" | one)"; fi
echo "home_free_kib=$(free "$HOME")"
has python3 && echo "python3=$(python3 -I -S -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)"
has nvidia-smi && echo nvidia_smi=yes
has flock || echo flock=no
echo "product=$(cat /sys/class/dmi/id/product_name 2>/dev/null | one)"
grep -qs 'nvidia.com/gpu' /etc/cdi/* /var/run/cdi/* && echo cdi=yes
for c in nvidia-container-runtime-hook nvidia-container-toolkit nvidia-container-runtime nvidia-ctk; do
  if has "$c"; then echo toolkit=yes; break; fi
done
if [ -d /run/systemd/seats ]; then
  if [ -e "/var/lib/systemd/linger/$user" ]; then echo linger=yes; else echo linger=no; fi
  has busctl && echo "kill_user_processes=$(bounded 10 busctl get-property org.freedesktop.login1 \
    /org/freedesktop/login1 org.freedesktop.login1.Manager KillUserProcesses 2>/dev/null | awk '{ print $2 }')"
fi

[ -z "$mps" ] || [ ! -e "$mps/control" ] || echo mps=yes
found=
for r in "$@"; do
  has "$r" || continue
  found="$found $r"
  case $r in
    podman) format='{{.Version.Version}}|{{.Store.GraphRoot}}|{{.Host.CgroupControllers}}' ;;
    docker) format='{{.ServerVersion}}|{{.DockerRootDir}}|' ;;
    apptainer) format= ;;
    *) continue ;;
  esac
  if [ -n "$format" ]; then out=$(bounded 10 "$r" info --format "$format" 2>&1 </dev/null)
  else out=$(bounded 10 "$r" version 2>&1 </dev/null); fi
  code=$?
  if [ $code -eq 124 ] || [ $code -eq 137 ]; then echo "$r.error=no answer within 10 s"
  elif [ $code -ne 0 ]; then echo "$r.error=$(echo "${out:-exit code $code}" | sed 's/^||* *//' | tail -n 3 | one)"
  elif [ -z "$format" ]; then echo "$r.version=$(echo "$out" | one)"
  else
    last=$(echo "$out" | tail -n 1); root=${last#*|}; groups=${root#*|}; root=${root%%|*}
    echo "$r.version=${last%%|*}"
    [ -n "$root" ] && echo "$r.free_kib=$(free "$root")"
    [ "$r" = podman ] && echo "podman.controllers=$groups"
  fi
done
echo "runtimes=$found"
"""
