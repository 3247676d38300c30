"""One load per module; each has `measure(setting)`, which returns its rows of the table."""
