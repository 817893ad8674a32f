"""Replaying workloads: traces, the event engine, metrics, bounds, reports. The deciding passes are sched's own."""
