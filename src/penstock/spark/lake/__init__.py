"""Tables of Parquet files with commits, on any file system that Spark reaches. Knows no
pipeline."""
