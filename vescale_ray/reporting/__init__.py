"""Views of a run for people: its report, the progress bar, Parquet tables, and the words for events."""
