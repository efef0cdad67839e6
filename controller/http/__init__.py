"""The controller's HTTP server: metrics in Prometheus' text format, status and commands, and the final scrape of a run."""
