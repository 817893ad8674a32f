"""Deciding: pure passes from a snapshot to a plan, compiled where they are hot.

``decide.decide`` and ``check.check`` are the cycle's two steps; ``explain.explain`` answers "why is it waiting" without
numpy or numba. Import the module you need: nothing is imported here, so that the CLI stays quick.
"""
