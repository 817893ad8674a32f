"""Plugins by which other programs use gpusched: a module each, which that program loads, and an extra of its own.

In: what that program hands over. Out: jobs, by `gpusched.api`. May import: `gpusched.api`, and that program.
Begin with `submitit`. Hydra takes plugins only from a package ``hydra_plugins``: ours is there, beside gpusched.
"""
