"""The implementation of ``gpusched replay``: policies x traces x seeds in parallel, metrics, bounds, the HTML page.

In: what a user asks (`request`). Out: outcomes as flat rows, tables' data, a page. May import: sim, views, promotion,
traces. Begin with `request`, then `study`; definitions of figures stand at `metrics.Metrics`.
"""
