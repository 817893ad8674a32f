"""paramiko, without ``invoke`` (a third of its import), which it wants for one keyword of an SSH config."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, cast

_without = sys.modules.setdefault("invoke", cast(Any, None)) is None
try:
    import paramiko as paramiko
    import paramiko.config as _config
finally:
    if _without:
        del sys.modules["invoke"]


def enable_match_exec() -> None:
    """Let a config say ``Match exec COMMAND``."""
    cast(Any, _config).invoke = import_module("invoke")
