"""The driver, which is the process of the CLI: checks before a run, the local Ray cluster, signals and the cleanup."""
