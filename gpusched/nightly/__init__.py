"""What cron runs each night: replays of lately submitted work under every policy, candidates trained and proved.

In: the store's history, inventory, policies. Out: the report, verdicts over policies, new candidates. May import:
agents, study. Begin with `replays`, then `candidates` and `proof`.
"""
