"""The learned predictor of run times: its training, the calibration of its quantiles, ``gpusched predict``.

In: ended jobs. Out: the file read by `gpusched.estimation.predictor`. Begin with `train`. May import: study,
forecast, traces.
"""
