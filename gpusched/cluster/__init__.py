"""The worlds a decision can be applied to. Each is a `Cluster`."""
