"""``gpusched train``: which agent learns from what, the final table beside heuristics, the weights and their card.

In: a `TrainRequest`. Out: a policy folder with weights and cards. It finds an agent's ``train`` module by its name.
May import: agents, study. Begin with `train.train`.
"""
