"""srun inside a job: what it is asked, a node's tasks, the way to other nodes. Runs there: stdlib, Python 3.6+."""
