"""Clean Debian systems as folders below build/systems, filled from Debian's mirror once."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SYSTEMS = Path(__file__).parents[2] / "build" / "systems"


def debian(suite: str, packages: Sequence[str]) -> tuple[Path, str]:
    """Return the root folder of a Debian release with these packages, and why there is none ("": there is).

    It is shared: what changes it mounts something over it.
    """
    folder = SYSTEMS / suite
    if (folder / "etc/os-release").exists():
        return folder, ""
    if shutil.which("mmdebstrap") is None:
        return folder, "needs mmdebstrap"
    SYSTEMS.mkdir(parents=True, exist_ok=True)
    # sid's index is soon out of date on a mirror that is a snapshot.
    words = ["mmdebstrap", "--variant=minbase", "--aptopt=Acquire::Check-Valid-Until \"false\""]
    done = subprocess.run(
        [*words, f"--include={','.join(packages)}", suite, str(folder)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        return folder, f"no {suite} from Debian's mirror: {done.stderr.strip().splitlines()[-1]}"
    return folder, ""
