"""Validation of image names. podman also opens transports that read the node's files, as root."""

from __future__ import annotations

import re
from collections.abc import Collection

from gpusched.model.resources import RuntimeName

TRANSPORTS = (
    "atomic", "containers-storage", "dir", "docker-archive", "docker-daemon", "oci", "oci-archive", "ostree", "sif",
    "tarball",
)  # fmt: skip
"""Ways of podman to open an image that is not in a registry (containers-transports(5))."""

_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = r"[A-Za-z][A-Za-z0-9+._-]*:[0-9A-Fa-f]{32,128}"
_REFERENCE = re.compile(rf"(?:docker://)?(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::{_TAG})?(?:@{_DIGEST})?")


def image_error(image: str, runtimes: Collection[str], transports: Collection[str]) -> str | None:
    """Return why nodes with these runtimes cannot run this image, or None where they can.

    apptainer opens images with the rights of the job's user, so it also accepts paths and other schemes.

    ``transports``: those of `TRANSPORTS` that the inventory allows.
    """
    if not {RuntimeName.PODMAN, RuntimeName.DOCKER}.intersection(runtimes):
        return None
    transport = image.partition(":")[0]
    if ":" in image and transport in TRANSPORTS:
        if transport in transports:
            return None
        return f"the image transport '{transport}:' is not allowed by settings.image_transports of inventory.yaml"
    if _REFERENCE.fullmatch(image) is None:
        return f"the image {image[:80]!r} is not a registry image name, [REGISTRY[:PORT]/]NAME[:TAG][@DIGEST]"
    return None
