"""What the commands do, apart from parsing and printing.

In: what was asked, the store (read-only), nodes for logs and exec. Out: command files in the inbox; values for views.
May import: queue, sched, forecast, nodes, config, model. Begin with `submit`, then `why`.
"""
