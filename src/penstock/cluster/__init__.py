"""The same broker on a replicated log: shared streams, replicas, ownership of shards."""
