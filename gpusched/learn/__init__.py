"""Training agents: the only place that imports torch, and only when something is trained.

``gpusched train`` goes through `gpusched.learn.train.train`. An agent's package here is named after it and offers
``train_agent(job: TrainJob, report: Report) -> Trained`` (see `gpusched.learn.request`).
"""
