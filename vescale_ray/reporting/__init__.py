"""What people read of a run: its report, the progress bar, Parquet tables, and the words for events."""
