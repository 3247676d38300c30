"""Benchmarks of the broker, with baselines in the same run. See `python -m bench --help`."""
