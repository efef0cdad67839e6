"""The compiled half of the operation table: ``torch.compile`` of each operation, on ragged tensors and on pending reductions.

``torch.compile`` traces a function twice, each time with other objects for the same mesh. The result that the first pass decides on must be
the one that the second computes. Threads would share compiled code, so the ranks are two gloo processes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tests.dtensor.op_coverage import DTYPES, PENDING, Warned, call, database, difference, draws, ragged_as, samples_of, usable, whole
from tests.ranks import RankFailed, run_gloo
from vescale_ray.dtensor import distribute_tensor
from vescale_ray.dtensor.placement import RaggedShard

CHUNK = 8
"""Operations per pair of processes."""

Found = dict[str, tuple[Counter[str], str]]
"""operation -> count of each outcome, and an example of a wrong result."""


def compiled(names: list[str], dtype: str, limit: int) -> Found:
    """Outcomes of the compiled operations: "exact", "close", "raised" (on both ranks), "WRONG", "HUNG"."""
    found: Found = {}
    for i in range(0, len(names), CHUNK):
        chunk = names[i : i + CHUNK]
        try:
            found |= _merged(run_gloo(2, _rank, chunk, dtype, limit, timeout=240.0 * len(chunk)))
        except RankFailed as error:
            if len(chunk) == 1:
                found[chunk[0]] = Counter({"HUNG" if "still running" in str(error) else "WRONG": 1}), str(error)[-300:]
            else:
                for name in chunk:
                    found |= compiled([name], dtype, limit)
    return found


def _merged(ranks: list[dict[str, list[tuple[str, str]]]]) -> Found:
    found: Found = {}
    for name in ranks[0]:
        outcomes: Counter[str] = Counter()
        example = ""
        for row in zip(*(rank[name] for rank in ranks), strict=True):
            levels = {level for level, _ in row}
            level = levels.pop() if len(levels) == 1 else "close" if levels == {"exact", "close"} else "WRONG"
            outcomes[level] += 1
            example = example if level != "WRONG" else "; ".join(why for _, why in row)
        found[name] = outcomes, example
    return found


def _rank(rank: int, world: int, names: list[str], dtype: str, limit: int) -> dict[str, list[tuple[str, str]]]:
    mesh, ops, warned = init_device_mesh("cpu", (world,)), database(), Warned()
    kind = DTYPES[dtype]

    def plain(v: Tensor, first: bool) -> Tensor:
        return v.detach().clone(memory_format=torch.contiguous_format)

    def distributed(layout: str, v: Tensor, first: bool) -> Tensor:
        if layout in PENDING:
            return ragged_as(layout, v, mesh, first)
        merged = tuple(range(v.ndim))
        placement = RaggedShard(merged, (v.numel() // 3, v.numel() - v.numel() // 3)) if v.numel() else RaggedShard((), (0, 1))
        return distribute_tensor(plain(v, first), mesh, [placement], src_data_rank=None)

    found: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        op, cases = ops[name], []
        samples = [s for s in samples_of(op, kind, limit) if usable(s)] if kind in op.supported_dtypes("cpu") else []
        for layout in ("elements", *PENDING):
            for sample in samples:
                case = _case(op, sample, plain, lambda v, first, layout=layout: distributed(layout, v, first))
                cases += [] if case is None else [(layout, *case)]
        found[name] = _outcomes(op.op, cases)
        warned.taken()
    return found


Arguments = tuple[Any, list[Any], dict[str, Any]]


def _case(op: Any, sample: Any, plain: Any, prepare: Any) -> tuple[Arguments, Any] | None:
    """Arguments whose result is pending, or of which several are, and the expected result.

    None for other arguments, for operations that plain tensors or the eager call refuse, and for random numbers.
    """
    try:
        expected = call(op, "function", sample, plain, None)
        if draws(op, "function", sample, plain, None) or not any(isinstance(v, Tensor) for v in tree_leaves(expected[0])):
            return None
        eager, arguments = call(op, "function", sample, prepare, None)
        meet = sum(map(_is_pending, tree_leaves(arguments))) > 1
        if not meet and not any(map(_is_pending, tree_leaves(eager))):
            return None  # no pending values, or one whose result is not pending
        if difference(whole(eager), expected[0])[0] == "WRONG":
            return None  # the table's other columns report it
    except Exception:
        return None
    return arguments, expected[0]


def _outcomes(op: Any, cases: list[tuple[str, Arguments, Any]]) -> list[tuple[str, str]]:
    """Outcomes of all cases in one function, which is compiled once. If it raises, each case runs by itself."""
    torch._dynamo.reset()

    def function(several: list[Arguments]) -> list[Any]:
        return [op(given, *args, **kwargs) for given, args, kwargs in several]

    try:
        results = torch.compile(function, backend="aot_eager")([arguments for _, arguments, _ in cases]) if cases else []
        compared = [(layout, difference(whole(result), expected)) for result, (layout, _, expected) in zip(results, cases, strict=True)]
        return [(level, f"{layout}: {why}") for layout, (level, why) in compared]
    except Exception as error:
        if len(cases) == 1:
            return [("raised", f"{cases[0][0]}: {type(error).__name__}: {error}"[:300])]
        return [outcome for case in cases for outcome in _outcomes(op, [case])]


def _is_pending(value: Any) -> bool:
    return isinstance(value, DTensor) and any(p.is_partial() for p in value.placements)
