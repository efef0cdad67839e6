"""Data that is too little for a step, or to hold out a sample, begins the run with a warning."""

from __future__ import annotations

from pathlib import Path

from vescale_ray.config import parse_config
from vescale_ray.controller.driver import preflight


def warned(path: Path, **data: object) -> tuple[str, ...]:
    """The warnings of a run whose steps take 12 samples of 8 tokens."""
    tree = {"run": {"dir": str(path.parent)}, "data": {"corpus": str(path), "seq_len": 8, "heldout": 0.05, **data}}
    return preflight.foresee(parse_config(tree)).warnings


def test_too_little_data_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 8 * 40)
    assert warned(path) == ()
    path.write_text("x" * 8 * 11)
    few, none = warned(path)
    assert few.startswith("the data has 10 training samples of data.seq_len = 8, and a step takes 12, so it takes some of them several")
    assert none.startswith("data.heldout = 0.05 of 10 samples is none, so there is no held-out loss; raise it, lower data.seq_len, or")
    path.write_text("x" * 8 * 15)
    for quiet in ({"heldout": 0.0}, {"eval_samples": 0}):
        assert warned(path, **quiet) == ()
