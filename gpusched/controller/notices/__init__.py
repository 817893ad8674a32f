"""Notifications by mail, webhook and command, sent beside the cycle.

In: the store's events, running jobs and their GPU use. Out: notices, kept in the store until they are delivered. May
import: what `gpusched.controller` may. Begin with `service.NotificationService`, then `making`, then `delivery`.
"""
