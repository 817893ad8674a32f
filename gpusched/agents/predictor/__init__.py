"""``gpusched predict``: predicted run times, and how good they are on days not seen.

In: ended jobs. Out: predictions, and scores beside those of usual estimates. Begin with `evaluate`. May import: study,
forecast, traces.
"""
