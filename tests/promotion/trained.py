"""A policy that was trained."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tests.cli.conftest import Site
from tests.promotion import weights
from tests.promotion.conftest import DAY_S


def trained(site: Site, days_ago: float | None, seed: int = 0, partition: str = "V100") -> Path:
    """The policy gist, with weights that are EASY with another order, trained until so many days ago."""
    folder = site.folder / "policies"
    folder.mkdir(exist_ok=True)
    (folder / "gist.yaml").write_text(weights.YAML)
    file = weights.write(folder / f"gist/{partition}.safetensors", seed)
    card: dict[str, Any] = {
        "policy": "gist", "agent": "gist", "partition": partition, "trained_at": "2026-11-20T10:00:00+00:00",
        "code_version": "0", "weights": "0", "device": "cpu", "seed": 0, "seeds": [0], "wall_time_s": 1.0,
        "knows": "limit", "inventory": [], "hyper_parameters": {}, "notes": ["a note"],
        "metrics": [{"policy": "gist", "figure": "mean_jct_s", "value": 12.5, "low": 11.0, "high": 14.0}],
        "trace": {"name": "history", "jobs": 9, "sha256": "ab" * 32, "held_out_jobs": 0, "last": None},
    }  # fmt: skip
    if days_ago is not None:
        card["trace"]["last"] = datetime.fromtimestamp(time.time() - days_ago * DAY_S, UTC).isoformat()
    (folder / f"gist/{partition}.card.yaml").write_text(yaml.safe_dump(card))
    return file


def row(site: Site, **wanted: Any) -> dict[str, Any]:
    rows = site.call("policy", "list", "--json").json
    (found,) = [r for r in rows if all(r[k] == v for k, v in wanted.items())]
    assert isinstance(found, dict)
    return found
