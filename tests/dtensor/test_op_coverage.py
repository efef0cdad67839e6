"""docs/reference/generated/op-coverage.md is true: repeat a part of the sweep that made it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from tests.dtensor.op_compiled import compiled
from tests.dtensor.op_coverage import DTYPES, ORDER, SAMPLES, VARIANTS, Warned, database, difference, sweep
from tests.dtensor.op_page import cell, table_lines

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "generated" / "op-coverage.md"
# Element-wise operations, reductions, views, joins, indexing, matrices, norms, losses: one for each path through the code.
CORE = (
    "abs add addcdiv addcmul amax bmm cat chunk clamp clone copysign cumsum diagonal div.no_rounding_mode eq erf expand "
    "fill fmod gather index_add index_select isnan kron lerp linalg.vector_norm log masked_fill matmul max.binary mean mul "
    "nn.functional.gelu nn.functional.linear nn.functional.mse_loss norm permute pow prod reshape rsub sigmoid sort split "
    "sqrt squeeze std sub sum t topk tril unsqueeze var where zeros_like"
).split()


def documented() -> dict[str, dict[str, set[str]]]:
    """operation -> variant -> outcomes, for the variants that are columns of the page."""
    found, columns = {}, []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| operation |"):
            columns = line.strip("| ").split(" | ")[1:]
        match = re.match(r"\| (`[^|]+`) \| (.+) \|$", line)
        if match:
            cells = [set() if c == "-" else set(c.split(", ")) for c in match[2].split(" | ")]
            for op in match[1].split(", "):
                found[op.strip("`")] = dict(zip(columns, cells, strict=True))
    return found


def test_coverage_page_lists_torchs_operations_and_none_is_wrong() -> None:
    table = documented()
    assert len(table) > 0.8 * len(database()), "operations without a dense tensor among their arguments are left out"
    assert not [op for op, cells in table.items() for c in cells.values() if c & {"WRONG", "HUNG", "CRASHED"}]
    known = {*ORDER, *(f"warned {name}" for name in ORDER)}
    assert not {name for cells in table.values() for c in cells.values() for name in c} - known


def test_operations_with_equal_outcomes_share_a_row() -> None:
    table = [("abs", "exact", "-"), ("cat", "close, raised", "-"), ("neg", "exact", "-")]
    assert table_lines(table) == ["| `abs`, `neg` | exact | - |", "| `cat` | close, raised | - |"]


def sums(outcomes: Iterable[str]) -> set[str]:
    """Count "close" as "exact". A sum in another order may or may not be equal, depending on the processor's vectors."""
    return {name.replace("close", "exact") for name in outcomes}


@pytest.fixture
def warned() -> Iterator[Warned]:
    with warnings.catch_warnings():
        yield Warned()


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
def test_coverage_page_matches_a_repeated_sweep(part: int, warned: Warned) -> None:
    if f"with torch {torch.__version__.split('+')[0]}:" not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("the page was made with another torch, whose operations and samples differ")
    table, ops = documented(), database()
    for name in CORE[part::8]:
        row = {"found": {"float32": sweep(ops[name], DTYPES["float32"], SAMPLES, warned)}}
        for variant in VARIANTS:
            found = cell(row, variant)
            examples = row["found"]["float32"].get("examples")
            if variant in table[name]:
                assert found == "-" or sums(found.split(", ")) <= sums(table[name][variant]), (name, variant, found, examples)
            assert not {"WRONG", "HUNG", "CRASHED"} & set(found.split(", ")), (name, variant, found, examples)


@pytest.mark.slow
def test_compiled_reductions_and_their_joins_are_right() -> None:
    """test_compile.py compiles joins of chosen tensors. This test compiles the samples of torch's own tests."""
    names = ["_foreach_add", "add", "addcmul", "cat", "linalg.vector_norm", "stack", "sum", "where"]
    for name, (outcomes, example) in compiled(names, "float32", 2).items():
        assert outcomes and set(outcomes) <= {"exact", "close"}, (name, outcomes, example)


def test_comparison_detects_wrong_values_dtypes_and_shapes() -> None:
    full = torch.arange(6.0)
    assert difference(full, full) == ("exact", "")
    assert difference(full + 1e-7, full)[0] == "close"
    for other in (full + 1, full.double(), full.reshape(2, 3), full.where(full != 3, torch.nan), (full, full)):
        assert difference(other, full)[0] == "WRONG"
