"""The command line: commands, the pages and progress that they show, and the client of a running controller.

:func:`main` is the entry point. It imports the commands when it is called, so that other modules of this package import no click.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    from vescale_ray.cli import app

    return app.main(argv)
