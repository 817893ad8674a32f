"""Runs Slurm's commands."""

from __future__ import annotations

from gpusched.errors import GpuschedError


class NoAnswer(GpuschedError):
    """Slurm does not answer: nothing is known of it now, and nothing may be decided for it."""
