"""HTML pages of the command line: one of a run (``vescale-ray dash``) and one of a plan (``vescale-ray plan --html``)."""
