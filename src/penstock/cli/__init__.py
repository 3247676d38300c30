"""The command line, one file per noun. No other package imports from here."""
