"""Mounts of users who may not mount everything: bound beneath allowed folders first, then given to the engine.

An engine follows the links of a source as root, whenever it gets to it. So the launcher binds the source to a place of
root's own, makes sure that what is bound there lies beneath an allowed folder, and gives the engine that place. Only
what the kernel reports counts: the path of a folder that was entered, the inode of a file in such a folder. The user
may swap links all the while; what he gains is a refusal.

The places lie outside of the attempt's folder, and nothing below them is ever removed: they are unmounted, and what is
not empty then stays.
"""

from __future__ import annotations

from gpusched.nodes.runtimes.base import AttemptRef, LaunchRequest
from gpusched.nodes.runtimes.shell import quote_all

_PIN_ROOT = "/run/gpusched-node"

PIN = """\
within() { # FOLDER...: whether the current folder lies beneath one of them
    # In another mount namespace, entered by /proc/PID/root, paths are whatever its owner made them.
    id=$(sed -n 's/^mnt_id:[[:space:]]*//p' /proc/self/fdinfo/0 <.) && grep -q "^$id " /proc/self/mountinfo || return
    current=$(readlink -n /proc/self/cwd && echo /) || return
    for allowed; do
        allowed=$(cd -P -- "$allowed" && readlink -n /proc/self/cwd && echo /) || continue
        [ "$allowed" != // ] || allowed=/
        case $current in "$allowed"*) return 0 ;; esac
    done
    return 1
}
is_one_of() { # FILE PATH...: whether the file is one that a path names
    file=$(stat -c %d:%i -- "$1") || return
    shift
    for allowed; do
        [ ! -d "$allowed" ] && [ "$(stat -L -c %d:%i -- "$allowed")" = "$file" ] && return 0
    done
    return 1
}
pin() ( # SOURCE PLACE FOLDER...: bind the source to the place if it lies beneath one of the folders
    real=$(readlink -n -f -- "$1" && echo /) || exit 1
    real=${real%/} place=$2
    shift 2
    entry=.
    [ -d "$real" ] || entry=./${real##*/}
    [ -d "$real" ] || real=${real%/*}/
    cd -P -- "$real" && { within "$@" || is_one_of "$entry" "$@"; } || exit 1
    umask 077
    mkdir -p -- "${place%/*}" && if [ "$entry" = . ]; then mkdir -- "$place"; else : >"$place"; fi || exit 1
    # Private, or unmounting it again would unmount what is mounted below the source.
    mount --rbind -- "$entry" "$place" && mount --make-rprivate -- "$place" || exit 1
    # Now nothing can be swapped any more: is it what was looked at?
    [ "$(stat -c %d:%i -- "$entry")" = "$(stat -c %d:%i -- "$place")" ] && within "$@" || is_one_of "$place" "$@"
)
"""

_UNPIN = """\
unpin() {
    [ -d "$pins" ] || return 0
    for place in "$pins"/*; do
        mount --make-rprivate -- "$place"
        umount -l -- "$place"
    done 2>/dev/null
    for place in "$pins"/*; do
        # No rm -r, ever: what is bound there belongs to users. These two cannot remove what is still a mount.
        rmdir -- "$place" || rm -f -- "$place"
    done 2>/dev/null
    rmdir -- "$pins" 2>/dev/null
}
"""


def pinned_path(request: LaunchRequest, index: int) -> str:
    """Return what the engine mounts for the request's mount of this index."""
    if request.mounts_beneath is None:
        return request.mounts[index].source
    return f"{_folder(request.ref)}/{index}"


def pin_lines(request: LaunchRequest) -> str:
    """sh: the function ``pin_mounts``, which binds all mounts that need it, or ends the launch."""
    lines = []
    for index, mount in enumerate(request.mounts if request.mounts_beneath is not None else ()):
        cannot = f"refused: cannot mount {mount.source}"  # the first word: whose fault it is (`cluster.base.REFUSED`)
        words = quote_all((mount.source, pinned_path(request, index), *(request.mounts_beneath or ())))
        # One answer for what is not there and for what is elsewhere: it reveals nothing that only root can see.
        refusal = quote_all([f"{cannot}: there is no such place beneath settings.allowed_mounts on this node"])
        # Unbound it could not be kept there, and only root may bind.
        no_root = quote_all([f"{cannot}: settings.allowed_mounts needs nodes that are entered as root"])
        lines.append(f'    [ "$(id -u)" = 0 ] || fail 1 {no_root}\n')
        lines.append(f"    pin {words} 2>/dev/null || {{ unpin; fail 1 {refusal}; }}\n")
    return f"pin_mounts() {{\n{''.join(lines)}    :\n}}\n"


def unpin_lines(ref: AttemptRef) -> str:
    """sh: the function ``unpin``, which undoes what was bound for an attempt, and may be called at any time.

    A started container keeps what it has: its mounts are its own.
    """
    return f"pins={quote_all([_folder(ref)])}\n{_UNPIN}"


def _folder(ref: AttemptRef) -> str:
    return f"{_PIN_ROOT}/{ref.cluster_id}/{ref.node}/{ref.name}"
