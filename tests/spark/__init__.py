"""Real Spark against a real broker."""
