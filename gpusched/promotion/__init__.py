"""Who decides: policies put in charge of partitions, frozen so that later training changes nothing, taken back.

In: inventory, policy folders, the store's promotions. Out: each partition's policy. May import: queue, config, model.
Begin with `live`, then `registry` and `freeze`.
"""
