"""``gpusched`` and ``python -m gpusched``."""

from gpusched.cli import interrupts


def main() -> None:
    """Run the command line and exit with its code."""
    interrupts.end_at_once()
    from gpusched.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
