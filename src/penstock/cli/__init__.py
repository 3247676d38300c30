"""The command line: one file a noun. Nothing outside imports from here."""
