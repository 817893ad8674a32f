"""Measured profiles: how fast models ran on which GPUs, on how many, beside whom, and with what cores and memory."""

from gpusched.sim.profiles.reading import read_profiles, read_restarts
from gpusched.sim.profiles.table import Profiles, Series

__all__ = ["Profiles", "Series", "read_profiles", "read_restarts"]
