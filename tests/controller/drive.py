"""``python -m tests.controller.drive CONFIG.yaml [STEP:ACTION:VALUE ..]``: a driver in a process of its own, for tests that end it."""

from __future__ import annotations

import sys

from vescale_ray.config import load_config
from vescale_ray.controller.driver.driver import ScheduledAction, run


def main(path: str, *actions: str) -> int:
    schedule = [ScheduledAction(int(step), name, int(value)) for step, name, value in (text.split(":") for text in actions)]  # type: ignore[arg-type]
    result = run(load_config(path), schedule=schedule)
    print(f"{result.state} {result.step} {result.error}", flush=True)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
