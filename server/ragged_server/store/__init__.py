"""The durable log: requests are appended in groups, sealed into shards, and read by cursor."""
