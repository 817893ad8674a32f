"""Active policies of partitions: promotion, frozen copies that later training does not change, rollback.

In: inventory, policy folders, the store's promotions. Out: each partition's policy. May import: queue, config, model.
Begin with `live`, then `registry` and `freeze`.
"""
