"""Cut a GPU of a node into MIG slices, or make it whole again: scripts around nvidia-smi, built without any I/O.

A GPU in MIG mode without instances runs nothing, and one with an instance of its full size has fewer units than without
MIG mode, and no NVLink. So a whole GPU has MIG mode off, and a cut begins by switching it on.
"""

from __future__ import annotations

import shlex

from gpusched.model.resources import MigSettings, RuntimeName
from gpusched.model.slices import Cut
from gpusched.nodes.transport import RemoteScript

SCRIPT_LIMIT_S = 60
"""Time limit of a cut, in seconds, enforced on the node."""

_PATH = 'PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"; LC_ALL=C; export PATH LC_ALL\n'

# nvidia-smi answers 0 also where MIG mode waits for a reset, as while NVML is in use: only the mode itself counts.
_SCRIPT = """\
fail() { printf '%s\\n' "$1" | tail -n 1 >&2; refresh; exit 1; }
refresh() { :; }
mode() { # Enabled 1, or Disabled 0
    tries=0
    while [ "$(nvidia-smi -i "$gpu" --query-gpu=mig.mode.current --format=csv,noheader)" != "$1" ]; do
        if [ $tries = 3 ]; then
            smi -i "$gpu" -mig $((1 - $2)) >/dev/null 2>&1 # or a later reset would change it
            fail "MIG mode of GPU $gpu stays as it was: $(printf '%s' "$said" | head -n 1)"
        fi
        [ $tries = 0 ] || sleep 1
        said=$(smi -i "$gpu" -mig "$2" 2>&1)
        tries=$((tries + 1))
    done
}
pids=$(nvidia-smi -i "$gpu" --query-compute-apps=pid --format=csv,noheader 2>/dev/null | grep '^[0-9]')
[ -z "$pids" ] || fail "GPU $gpu is in use by pid $(echo $pids)"
"""
_DESTROY = """\
smi mig -i "$gpu" -dci >/dev/null 2>&1
said=$(smi mig -i "$gpu" -dgi 2>&1)
if smi mig -i "$gpu" -lgi >/dev/null 2>&1; then fail "$said"; fi
"""
_LISTED = """\
case $said in
*"GPU instances"* | *"MIG-enabled"*) ;;
*) printf '%s\\n' "$said" | tail -n 1 >&2; exit 1 ;;
esac
"""
_CREATE = 'said=$(smi mig -i "$gpu" -cgi "$profiles" -C 2>&1) || fail "$said"\n'


def cut_script(settings: MigSettings, runtime: str, cut: Cut) -> RemoteScript:
    """Return the script that carries out a cut. It changes nothing while a process is on the GPU.

    It exits 0 when the GPU is as asked for; else its stderr says why, and the GPU may be half cut: look at it again.
    """
    body = f'{_PATH}gpu={cut.gpu}\nsmi() {{ {shlex.join(settings.command)} "$@"; }}\n{_SCRIPT}'
    if runtime == RuntimeName.PODMAN:
        command = f"said=$({shlex.join(settings.cdi_command)} 2>&1 </dev/null)"
        body += f"refresh() {{ {command}; }}\n"
        end = 'refresh || { printf "%s\\n" "$said" | tail -n 1 >&2; exit 1; }\n'
    else:
        end = ""
    if cut.slices:
        profiles = ",".join(f"{profile}:{start}" for profile, start in cut.slices)
        body += f"profiles={shlex.quote(profiles)}\nmode Enabled 1\n{_DESTROY}{_CREATE}"
    else:
        # With MIG mode off there are no instances, and nvidia-smi refuses to look for any.
        query = 'nvidia-smi -i "$gpu" --query-gpu=mig.mode.current --format=csv,noheader'
        body += f'if [ "$({query})" = Enabled ]; then\n{_DESTROY}mode Disabled 0\nfi\n'
    bounded = f"if command -v timeout >/dev/null; then exec timeout -k 5 {SCRIPT_LIMIT_S} sh -s; else exec sh -s; fi"
    return RemoteScript(("sh", "-c", bounded), (body + end).encode())


def permission_script(settings: MigSettings, runtime: str) -> RemoteScript:
    """Return the script that tries what cuts need without changing anything; stderr says what is not permitted.

    ``nvidia-smi mig -lgi`` is run as cuts run it; where sudo is in the way, it is asked about the rest.
    """
    lines = f"{_PATH}said=$({shlex.join(settings.command)} mig -lgi 2>&1 </dev/null)\n{_LISTED}"
    others = [(*settings.command, "-i", "0", "-mig", "1"), (*settings.command, "mig", "-i", "0", "-cgi", "0", "-C")]
    if runtime == RuntimeName.PODMAN:
        others.append(settings.cdi_command)
    for words in others:
        if words[:2] == ("sudo", "-n"):
            what, asked = shlex.join(words[2:]), f"sudo -n -l {shlex.join(words[2:])}"
        else:
            what, asked = words[0], f"command -v {shlex.quote(words[0])}"
        lines += f"{asked} >/dev/null 2>&1 </dev/null || {{ echo {shlex.quote(what)} >&2; exit 2; }}\n"
    return RemoteScript(("sh", "-s"), lines.encode())


def sudo_lines(settings: MigSettings, runtime: str, user: str) -> str:
    """Return the line for sudoers that permits what cuts need."""
    smi = settings.command[-1]
    # Each * of sudoers stands for any words, also for -f FILE: none before or after -mig.
    commands = [f"{smi} mig *", *(f"{smi} -i {gpu} -mig [01]" for gpu in ("[0-9]", "[0-9][0-9]"))]
    if runtime == RuntimeName.PODMAN:
        commands.append(shlex.join(settings.cdi_command[2:]))
    return f"{user} ALL=(root) NOPASSWD: {', '.join(commands)}"
