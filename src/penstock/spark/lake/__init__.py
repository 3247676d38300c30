"""Tables of Parquet files with commits, on any file system Spark reaches. Knows no pipeline."""
