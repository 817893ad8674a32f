"""Slurm as the engine: what it says, what is mirrored, decided and handed over."""
