"""The nightly run: replays of recent jobs under every policy, candidates trained and validated.

In: the store's history, inventory, policies. Out: the report, verdicts over policies, new candidates. May import:
agents, study. Begin with `replays`, then `candidates` and `proof`.
"""
