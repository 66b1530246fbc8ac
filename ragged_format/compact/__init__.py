"""The compact encoding of shards (spec §5.5): exact, a fraction of the size."""
