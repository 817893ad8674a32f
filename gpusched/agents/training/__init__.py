"""``gpusched train``: training of agents, the final table beside heuristics, the weights and their card.

In: a `TrainRequest`. Out: a policy folder with weights and cards. An agent's ``train`` module is found by its name.
May import: agents, study. Begin with `train.train`.
"""
