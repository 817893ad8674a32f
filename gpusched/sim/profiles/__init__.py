"""Measured profiles: speeds of models by GPU type, number of GPUs, co-located job, CPU cores and memory."""

from gpusched.sim.profiles.reading import read_profiles, read_restarts
from gpusched.sim.profiles.table import Profiles, Series

__all__ = ["Profiles", "Series", "read_profiles", "read_restarts"]
