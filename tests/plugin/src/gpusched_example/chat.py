"""A notifier: the text of each notice goes to the end of a file, where a real one would call a chat's API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def send(body: Mapping[str, Any], options: Mapping[str, str]) -> None:
    """Send one notice; any exception means that it did not arrive, and it is sent again later.

    Args:
        body: The notice, as webhooks get it: ``text``, ``notice``, ``job``, ``node`` and so on.
        options: The receiver's ``options`` in inventory.yaml.
    """
    with Path(options["file"]).open("a") as chat:
        chat.write(f"{options.get('prefix', '')}{body['text']}\n")
