"""``gpusched`` and ``python -m gpusched``."""

import gc

from gpusched.cli import interrupts, stdout


def main() -> None:
    """Run the command line and exit with its code."""
    gc.set_threshold(200_000)  # nothing that imports make is garbage: looking takes a tenth of a short command's time
    interrupts.end_at_once()
    stdout.reserve()
    from gpusched.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
