"""Settle a restored store by what the nodes show and keep.

In: the store, readings and records of nodes. Out: changed jobs, ranks, runs and usage, and which jobs these are. May
import: what `controller` may. Begin with `gpusched.controller.rebuilding`, which calls `settling` for all nodes that
answer; `unsettled` does it for the others, in the controller's cycle.
"""
