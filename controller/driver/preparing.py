"""Make the files of a :class:`vescale_ray.data.preparation.Preparation` in parallel with Ray Data."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from vescale_ray.config import parse_config
from vescale_ray.controller.driver.local_ray import Cluster
from vescale_ray.data.preparation import Preparation, PreparedFile, make
from vescale_ray.data.sources.files import reason_of
from vescale_ray.errors import BadInput

STORE_MB = 200
"""Object store of a local cluster. Only the results of tasks, some hundred bytes each, go through it."""


class StorageFailed(RuntimeError):
    """The storage did not answer; the message is one line. Files that are finished stay."""


def prepare(made: Preparation, workers: int | None, tell: Callable[[PreparedFile], object]) -> None:
    """Make all files that are not finished, on the Ray of ``RAY_ADDRESS``, or on a local one.

    Args:
        workers: tasks at a time; None: as many as there are CPUs.
        tell: called with each finished file.

    Raises:
        BadInput: a document is damaged, or Ray Data is not installed; one line. Files that are finished stay.
        StorageFailed: a source or the output can't be reached.
    """
    cpus = workers or len(os.sched_getaffinity(0))
    cluster = Cluster(parse_config({"ray": {"num_cpus": cpus, "object_store_mb": STORE_MB}, "elastic": {"workers": 1}}))
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")  # read when Ray Data is imported
    try:
        try:
            import ray.data as data
        except ImportError as error:
            raise BadInput(f"Ray Data is not installed ({error.name}); pip install 'vescale-ray[data]'") from None
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        numbers = data.from_items(list(range(len(made.pieces))), override_num_blocks=len(made.pieces))

        def done(row: dict[str, Any]) -> dict[str, Any]:
            # Each task has one CPU; the package's threads would take all of them.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            try:
                return {"made": make(made, int(row["item"])), "error": None}
            except BadInput as error:  # as a value, because an exception would come with the traceback of Ray Data
                return {"made": None, "error": error}
            except OSError as error:
                return {"made": None, "error": StorageFailed(f"{made.out}: {reason_of(error)}; the same command goes on")}

        for row in numbers.map(done, num_cpus=1, concurrency=workers).iter_rows():
            if row["error"] is not None:
                raise row["error"]
            tell(row["made"])
    finally:
        cluster.close()
