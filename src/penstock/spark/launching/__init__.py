"""From a command to a run: which pipelines are meant, Spark, signals, a screen, a register."""
