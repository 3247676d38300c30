"""Loads that measure the broker beside their own baselines. `python -m bench --help`."""
