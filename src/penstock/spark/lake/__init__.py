"""Tables of Parquet files with commits, on any file system of Spark. Knows no pipeline."""
