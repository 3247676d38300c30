"""One load a module; each has `measure(setting)`, which returns its rows of the table."""
