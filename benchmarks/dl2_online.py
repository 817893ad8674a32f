"""DL2's online learning on drawn histories: a trained shadow of another policy, and its update of one night.

    python -m benchmarks.dl2_online [--policy elastic] [--seeds 1,2,3]

A month of 560 jobs on 16 GPUs under the policy is drawn, all resizable but every sixth. The agent is trained on the
days until two weeks ago (15 rounds), becomes a shadow, and a night follows. Printed are what it learned, and the
verdicts on the shadow and on its update, against the policy, on the days that each has not seen. Some three minutes a
seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpusched.config.inventory import load_inventory
from gpusched.controller.commandfiles import CommandApplier
from gpusched.controller.secretfiles import SecretFiles
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.agents.histories import DAY, lived

INVENTORY = """\
defaults: {{runtime: process, gpus: 8, cores: 64, memory: 512G}}
partitions:
  p: {{policy: {policy}, nodes: [n1, n2], flavors: {{all: {{gpus: 8, cores: 64, memory: 512G, time: 72h}}}}}}
"""


def gpusched(folder: Path, *words: str) -> str:
    env = os.environ | {"GPUSCHED_STATE": str(folder / "state"), "GPUSCHED_INVENTORY": str(folder / "inventory.yaml")}
    command = (sys.executable, "-m", "gpusched", *words)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def night(folder: Path, policy: str, seed: int) -> dict[str, Any]:
    (folder / "inventory.yaml").write_text(INVENTORY.format(policy=policy))
    (folder / "policies").mkdir()
    (folder / "policies" / "dl2.yaml").write_text("agent: dl2\nfallback: elastic\ntrain: {rounds: 15, batch: 4}\n")
    now = time.time()
    lived(folder / "state", policy, jobs=560, days=27.5, seed=seed, start=now - 28 * DAY)
    until = time.strftime("%Y-%m-%dT00:00", time.gmtime(now - 15 * DAY))
    gpusched(folder, "train", "dl2", "--hold-out", "0", "--keep-anyway", "--until", until, "--out", "policies/dl2")
    gpusched(folder, "policy", "shadow", "dl2", "-p", "p")
    store = Store.create_or_open(folder / "state")
    inventory = load_inventory(folder / "inventory.yaml")
    CommandApplier(store, Inbox(folder / "state"), inventory, SecretFiles(folder / "state")).apply_inbox(now)
    store.close()
    found: dict[str, Any] = json.loads(gpusched(folder, "replay", "--nightly", "--since", "1d", "--json"))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--policy", default="elastic")
    options.add_argument("--seeds", default="1,2,3")
    asked = options.parse_args()
    for seed in map(int, asked.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found = night(Path(folder), asked.policy, seed)
        print(f"seed {seed}", *found["trained"], *(f"{j['state']}: {j['line']}" for j in found["judged"]), sep="\n  ")


if __name__ == "__main__":
    main()
