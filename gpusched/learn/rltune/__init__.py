"""RLTune (Dongare et al., SoCC 2025): `train_agent` is what ``gpusched train`` calls."""

from gpusched.learn.rltune.train import train_agent

__all__ = ["train_agent"]
