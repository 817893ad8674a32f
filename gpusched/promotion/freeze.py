"""Content-addressed copies of policies in the state folder, unaffected by later training."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from gpusched.config.paths import sync_folder
from gpusched.config.policies import POLICY, WEIGHTS, load_policy
from gpusched.config.weights import CARD
from gpusched.errors import GpuschedError
from gpusched.model.policy import PolicySpec

FOLDER = "policies"
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # it is no fault of the policy's, and passes


def freeze(path: Path, spec: PolicySpec, state: Path, folders: tuple[Path, ...]) -> PolicySpec:
    """Copy a policy to ``policies/VERSION/NAME`` in the state folder, with its weights, cards and fallback.

    A copy that is there and whole is kept as it is; one that is not is replaced.

    Args:
        path: The policy's file or folder.
        spec: What was read there.
        state: The state folder.
        folders: Where its fallback was looked for.

    Returns:
        The policy with its weights in the copy.

    Raises:
        GpuschedError: It cannot be read or written, or changed meanwhile.
        OSError: The disk is full, or read-only.
    """
    target = state / FOLDER / spec.version / spec.name
    if not _whole(target, spec):
        try:
            _copy(path, spec, target, folders)
        except OSError as error:
            if error.errno in _DISK_ERRNOS:
                raise
            raise GpuschedError(f"{error.filename or path} cannot be copied: {error.strerror or error}") from None
    return msgspec.structs.replace(spec, folder=str(target) if spec.agent else "")


def _whole(folder: Path, spec: PolicySpec) -> bool:
    try:
        return load_policy(folder).version == spec.version
    except (GpuschedError, OSError):
        return False


def _copy(path: Path, spec: PolicySpec, target: Path, folders: tuple[Path, ...]) -> None:
    root = target.parent.parent
    root.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    try:
        folder = draft / spec.name
        folder.mkdir()
        shutil.copyfile(path / POLICY if path.is_dir() else path, folder / POLICY)
        if spec.fallback is not None:
            for source in ((path if path.is_dir() else path.parent), *folders):
                if (file := source / f"{spec.fallback.name}.yaml").is_file():
                    shutil.copyfile(file, folder / file.name)
                    break
        if spec.agent is not None:
            for file in sorted(Path(spec.folder).iterdir()):
                if file.name.endswith(WEIGHTS) and file.is_file():
                    shutil.copyfile(file, folder / file.name)
                elif file.name.endswith(CARD):
                    _copy_card(file, folder / file.name)
        if not _whole(folder, spec):
            raise GpuschedError(f"{path} changed while it was copied", "try again")
        for file in folder.iterdir():  # the original may be removed later
            with file.open("rb") as copied:
                os.fsync(copied.fileno())
        sync_folder(folder)
        target.parent.mkdir(exist_ok=True)  # another policy may have the same content, and so the same version
        if target.exists():  # a copy that is not whole any more: out of the way
            os.replace(target, draft / "old")
        os.replace(folder, target)
        for changed in (target.parent, root, root.parent):
            sync_folder(changed)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy_card(file: Path, copy: Path) -> None:
    """Copy a training card. The version says nothing of it: a link of its owner's may lead to a secret of ours."""
    if file.is_symlink():
        raise GpuschedError(f"{file} is a link", "copy the training card there")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # it may be replaced meanwhile
    with open(file, "rb", opener=lambda path, _: os.open(path, flags)) as card, copy.open("xb") as target:
        shutil.copyfileobj(card, target)
