"""The history of runs: Parquet files and their schema, asked with SQL."""
