"""Who decides: policies put in charge of partitions, frozen, proved on held-out days, taken back."""
