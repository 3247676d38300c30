"""What a pipeline is, and a run of one: its queries and jobs. Knows no pipeline by name."""
