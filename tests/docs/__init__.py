"""The documents against the broker they describe: examples run, tables are complete."""
