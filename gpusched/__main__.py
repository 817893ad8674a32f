"""``gpusched`` and ``python -m gpusched``."""

import atexit
import gc

from gpusched.cli import blas, interrupts, stdout

GC_THRESHOLD = 200_000
"""Objects after which Python looks for garbage: imports make none, and looking takes a tenth of a short command."""


def main() -> None:
    """Run the command line and exit with its code."""
    gc.set_threshold(GC_THRESHOLD)
    atexit.register(gc.freeze)  # Python would look through everything once more as it ends
    blas.use_one_thread()
    interrupts.end_at_once()
    stdout.reserve()
    from gpusched.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
