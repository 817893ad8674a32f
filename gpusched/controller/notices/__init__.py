"""Telling people: by mail, webhooks and commands, beside the cycle.

In: the store's events, what runs and how its GPUs are used. Out: notices, kept in the store until they have arrived.
May import: what `gpusched.controller` may. Begin with `desk.NoticeDesk`, then `making`, then `delivery`.
"""
