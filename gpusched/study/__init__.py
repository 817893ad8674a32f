"""What ``gpusched replay`` does: policies x traces x seeds in parallel, metrics, bounds, comparison, the HTML page.

In: what a user asks (`request`). Out: outcomes as flat rows, tables' data, a page. May import: sim, views, promotion,
traces. Begin with `request`, then `study`; definitions of figures stand at `metrics.Metrics`.
"""
