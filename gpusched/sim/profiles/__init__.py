"""Measured profiles: how fast models ran on which GPUs, on how many, over how many nodes, and beside whom."""

from gpusched.sim.profiles.reading import read_profiles
from gpusched.sim.profiles.table import Profiles, Series

__all__ = ["Profiles", "Series", "read_profiles"]
