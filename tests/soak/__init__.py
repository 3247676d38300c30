"""The soak: all features at random against a real broker, with faults, checked against a model."""
