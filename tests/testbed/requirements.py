"""Requirements of the testbed on the machine."""

import os
import shutil
from pathlib import Path

PACKAGE_OF = {
    "busybox": "busybox-static",
    "conmon": "conmon",
    "gcc": "gcc",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "podman": "podman",
    "runc": "runc",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "tini": "tini",
    "tini-static": "tini",
    "unshare": "util-linux",
}
"""The Debian package each command comes from."""

SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def which(command: str) -> str | None:
    """The command's path; sbin is searched too, whatever the caller's PATH says."""
    return shutil.which(command, path=SEARCH)


def why_unavailable() -> str | None:
    """Why this machine cannot run the testbed, in one line for a person; None when it can."""
    if os.uname().sysname != "Linux":
        return "the testbed needs Linux"
    if os.geteuid() != 0:
        return "the testbed needs root, for network and mount namespaces"
    missing = sorted(c for c in PACKAGE_OF if which(c) is None)
    if missing:
        packages = " ".join(sorted({PACKAGE_OF[c] for c in missing}))
        return f"the testbed needs {', '.join(missing)} (Debian: apt-get install --no-install-recommends {packages})"
    if not Path("/usr/bin/python3").exists():
        return "the testbed needs /usr/bin/python3 for its nodes (Debian: apt-get install python3-minimal)"
    return None
