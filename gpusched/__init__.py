"""gpusched: a GPU cluster over plain SSH."""

__version__ = "0.1.0"
