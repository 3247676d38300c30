"""The names of Penstock's own pipelines: each is a module of this package with a PIPELINE."""

BUILT_IN = ("archive", "lineage", "metrics", "deadletters", "replay", "materialize", "route")
