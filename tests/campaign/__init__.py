"""The campaign: a random workload on the testbed while everything around it fails, at random and in mixtures.

    python -m tests.campaign --seed 1 --faults 200 --jobs 100

All choices come from the seed before the run (`schedule`). Each fault is a class (`faults`), with real parts: kill -9,
SIGSTOP, pulled cables, full file systems, a preloaded library that fails the nth write (`shim`). Jobs write their own
ledger (`ledger`), outside of gpusched's state, and lock their GPUs' files: `invariants` holds both against the store.
"""
