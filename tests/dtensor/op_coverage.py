"""Results of every torch operation on ragged tensors, for torch's own sample inputs (OpInfo), compared with plain tensors.

    python -m tests.dtensor.op_coverage --results build/op-coverage.jsonl              # restartable: done operations are kept
    python -m tests.dtensor.op_coverage --results build/op-coverage.jsonl --render docs/reference/generated/op-coverage.md

Each sample's tensors become ragged in three layouts on threads (:data:`LAYOUTS`), and tensors with a pending reduction in three ways
(:data:`PENDING`). The operation is called as a function, in place and with ``out=``. Its results and its changed arguments are compared
with those of the same call on plain tensors. ``op_compiled.py`` does the same for the compiled function, in processes.

Each chunk of operations has one process. If it dies or is silent for too long, the present operation is recorded as crashed or hung, and
a new process goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tests.ranks import RankFailed, run_threads
from vescale_ray.dtensor import RaggedFallbackWarning, distribute_tensor
from vescale_ray.dtensor.derived import derived
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.redistribution import plain_spec
from vescale_ray.dtensor.spec import norm_partial
from vescale_ray.dtensor.transfer import MOVABLE

LAYOUTS = {"elements": (3,), "rows": (3,), "with Shard(0)": (2, 2)}
PENDING = {"pending sum": (2,), "pending norm": (2,), "pending max": (2,)}
ALL_LAYOUTS = {**LAYOUTS, **PENDING}
VARIANTS = ("function", "in place", "out=", "gradient", "pending", "compiled")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "bool": torch.bool, "complex64": torch.complex64}
ORDER = ("exact", "close", "random", "raised", "torch", "WRONG", "HUNG", "CRASHED")
UNINITIALIZED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "resize_", "resize_as_"}
SAMPLES = 4
"""Samples of each operation. Their choice depends on this number, so the page and its test use the same."""
SILENCE = 300.0
"""Seconds without a finished operation after which a chunk counts as hung."""

Outcome = tuple[str, bool, str]
"""(one of ORDER, whether a RaggedFallbackWarning was given, the error or the difference)"""


# -- one operation -----------------------------------------------------------------------------------------------------------


def ragged_as(layout: str, tensor: Tensor, mesh: DeviceMesh, first: bool) -> Tensor:
    """``tensor`` in a layout; a tensor that is not dense stays as it is."""
    tensor = tensor.detach().contiguous()
    if layout in PENDING:
        return pending_as(layout, tensor, mesh)
    ndim, numel = tensor.ndim, tensor.numel()
    merged = tuple(range(ndim))
    placements: list[Placement]
    if layout == "elements":
        ragged = RaggedShard(merged, (numel // 4, 0, numel - numel // 4)) if ndim and numel else RaggedShard((), (0, 1, 0))
        placements = [ragged]
    elif layout == "rows":
        if not first:
            return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        rows = tensor.shape[0] if ndim else 0
        placements = [RaggedShard((0,), (rows - rows // 3, rows // 3, 0)) if rows else RaggedShard((), (1, 0, 0))]
    else:
        units = (1, 2) if ndim and tensor.shape[0] % 2 == 0 and math.prod(tensor.shape) % 6 == 0 and numel else (0, 1)
        ragged = RaggedShard(merged, units) if units == (1, 2) else RaggedShard((), units)
        placements = [ragged, Shard(0) if ndim else Replicate()]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def pending_as(layout: str, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """``tensor`` as the pending result of a ragged tensor's reduction on two ranks.

    The reduction is a sum, a 2-norm (if no element is negative) or a maximum. Dtypes that no collective reduces are replicated instead.
    """
    rank, other = mesh.get_local_rank(), torch.zeros_like(tensor)
    if tensor.dtype not in MOVABLE and not tensor.is_complex():
        return derived(tensor, plain_spec(mesh, [Replicate()], tensor.shape, tensor.dtype))
    placement: Placement = Partial("sum")
    seed = zlib.crc32(repr(tensor.flatten()[:4].tolist()).encode())  # the seed differs by tensor, and so do the first rank's elements
    first = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    if layout == "pending max" and not tensor.is_complex():
        placement = Partial("max")
        lowest = -math.inf if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        tensor, other = tensor.where(first, lowest), tensor.where(~first, lowest)
    elif layout == "pending norm" and tensor.is_floating_point() and bool((tensor >= 0).all()):
        placement = norm_partial(2)
        tensor, other = tensor.where(first, 0), tensor.where(~first, 0)
    elif tensor.is_floating_point() or tensor.is_complex():
        other = (-tensor).where((2 * tensor).isfinite(), 0)  # 2 x and -x add up to x without rounding, and are not symmetric
        tensor = tensor - other
    else:
        tensor, other = tensor - tensor // 3, tensor // 3
    return derived(other if rank else tensor, plain_spec(mesh, [placement], tensor.shape, tensor.dtype))


def samples_of(op: Any, dtype: torch.dtype, limit: int) -> list[Any]:
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    if len(found) > limit:
        found = [found[round(i * (len(found) - 1) / (limit - 1))] for i in range(limit)]
    return found


def usable(sample: Any) -> bool:
    """True if all tensors are dense, and there is at least one."""
    tensors = [v for v in tree_leaves((sample.input, list(sample.args), dict(sample.kwargs))) if isinstance(v, Tensor)]
    plain = all(t.layout is torch.strided and not t.is_quantized and not t.is_nested for t in tensors)
    return bool(tensors) and plain and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


def whole(value: Any) -> Any:
    return tree_map(lambda v: v.full_tensor() if isinstance(v, DTensor) else v, value)


def difference(found: Any, expected: Any, values: bool = True) -> tuple[str, str]:
    """("exact" | "close" | "WRONG", the difference)."""
    left, shape = tree_flatten(found)
    right, other = tree_flatten(expected)
    if len(left) != len(right):
        return "WRONG", f"{shape} instead of {other}"
    level = "exact"
    for a, b in zip(left, right, strict=True):
        if not isinstance(b, Tensor):
            if isinstance(a, Tensor) or (a != b and not (a != a and b != b)):
                return "WRONG", f"{a!r} instead of {b!r}"[:200]
            continue
        if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return "WRONG", f"{getattr(a, 'shape', a)} {getattr(a, 'dtype', '')} instead of {b.shape} {b.dtype}"
        if not values:
            continue
        if a.dtype in (torch.float16, torch.complex32):  # the comparison needs functions that these dtypes lack
            a, b = a.to(torch.complex64 if a.is_complex() else torch.float32), b.to(torch.complex64 if b.is_complex() else torch.float32)
        if not torch.equal(a, b) and not _close(a, b, rtol=0.0, atol=0.0):
            why = _apart(a, b, **({"rtol": 0.04, "atol": 0.02} if b.dtype is torch.bfloat16 else {}))
            if why:
                return "WRONG", why
            level = "close"
    return level, ""


def _close(a: Tensor, b: Tensor, **tolerance: Any) -> bool:
    return not _apart(a, b, **tolerance)


def _apart(a: Tensor, b: Tensor, **tolerance: Any) -> str:
    try:
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""


class Warned:
    """RaggedFallbackWarnings by thread, because the warnings module has one state for all threads."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RaggedFallbackWarning)
        warnings.showwarning = self._show

    def _show(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, RaggedFallbackWarning):
            self.threads.add(threading.get_ident())

    def taken(self) -> bool:
        mine = threading.get_ident()
        seen = mine in self.threads
        self.threads.discard(mine)
        return seen


def call(op: Any, variant: str, sample: Any, prepare: Callable[[Tensor, bool], Tensor], out: Any) -> tuple[Any, Any]:
    """(result, arguments afterwards) of one call on the sample, with its tensors converted by ``prepare``."""
    leaves: list[Tensor] = []
    if variant == "gradient":
        inner = prepare

        def prepare(v: Tensor, first: bool) -> Tensor:
            leaf = inner(v, first)
            if leaf.is_floating_point() or leaf.is_complex():
                leaves.append(leaf.requires_grad_())
            return leaf

    given = tree_map(lambda v: prepare(v, True) if isinstance(v, Tensor) else v, sample.input)
    args = tree_map(lambda v: prepare(v, False) if isinstance(v, Tensor) else v, list(sample.args))
    kwargs = tree_map(lambda v: prepare(v, False) if isinstance(v, Tensor) else v, dict(sample.kwargs))
    torch.default_generator.manual_seed(2)
    if variant == "function":
        result = op(given, *args, **kwargs)
    elif variant == "gradient":
        results = [whole(r) for r in tree_leaves(op(given, *args, **kwargs)) if isinstance(r, Tensor) and r.requires_grad]
        if not results:
            raise LookupError("nothing to differentiate")
        loss = sum((r * torch.linspace(0.5, 1.5, r.numel()).reshape(r.shape)).abs().sum() for r in results)
        return torch.autograd.grad(loss, leaves, allow_unused=True), ()  # type: ignore[arg-type]
    elif variant == "in place":
        result = op.inplace_variant(given, *args, **kwargs)
    else:
        targets = tree_map(lambda v: prepare(torch.zeros_like(v), True), out)
        result = op(given, *args, **kwargs, out=targets)
        return targets, (given, args, kwargs)
    return result, (given, args, kwargs)


def attempt(op: Any, variant: str, layout: str, sample: Any, mesh: DeviceMesh, warned: Warned) -> Outcome | None:
    """Make and compare one call. None if plain tensors refuse it, too."""

    def plain(v: Tensor, first: bool) -> Tensor:
        return v.detach().clone(memory_format=torch.contiguous_format)

    try:
        out = op(*_plain_arguments(sample, plain)[0], **_plain_arguments(sample, plain)[1]) if variant == "out=" else None
        if variant == "out=" and not all(isinstance(v, Tensor) for v in tree_leaves(out)):
            return None
        expected = call(op, variant, sample, plain, out)
    except Exception:
        return None
    warned.taken()
    try:
        found = call(op, variant, sample, lambda v, first: ragged_as(layout, v, mesh, first), out)
        gathered = (whole(found[0]), whole(found[1]))
    except Exception as error:
        return "raised", warned.taken(), f"{type(error).__name__}: {error}"[:300]
    seen = warned.taken()
    if op.name in UNINITIALIZED:
        return _outcome("exact", gathered, expected, seen, False)
    level = _outcome("exact", gathered, expected, seen, True)
    if level[0] == "WRONG" and draws(op, variant, sample, plain, out):
        return _outcome("random", gathered, expected, seen, False)
    if level[0] == "WRONG":  # perhaps torch is wrong: some of its composites ignore out= for every tensor subclass
        theirs = call(op, variant, sample, lambda v, first: DTensor.from_local(plain(v, first), mesh, [Replicate()] * mesh.ndim), out)
        if _outcome("exact", (whole(theirs[0]), whole(theirs[1])), expected, seen, True)[0] == "WRONG":
            return "torch", seen, level[2]
    return level


def _outcome(level: str, found: Any, expected: Any, seen: bool, values: bool) -> Outcome:
    result, why = difference(found[0], expected[0], values)
    left, why_left = difference(found[1], expected[1], values)
    if "WRONG" in (result, left):
        return "WRONG", seen, why or f"arguments afterwards: {why_left}"
    return ("close" if "close" in (result, left) else level), seen, ""


def _plain_arguments(sample: Any, plain: Callable[[Tensor, bool], Tensor]) -> tuple[list[Any], dict[str, Any]]:
    def make(value: Any) -> Any:
        return tree_map(lambda v: plain(v, True) if isinstance(v, Tensor) else v, value)

    return [make(sample.input), *make(list(sample.args))], make(dict(sample.kwargs))


class Draws(TorchDispatchMode):
    """Detects whether random numbers are drawn.

    On threads all ranks draw from one generator, so values can't be compared here. tests/dtensor/test_ops.py compares them with those of
    one device.
    """

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def draws(op: Any, variant: str, sample: Any, plain: Callable[[Tensor, bool], Tensor], out: Any) -> bool:
    with Draws() as mode:
        call(op, variant, sample, plain, out)
    return mode.drew


def has(op: Any, variant: str, dtype: torch.dtype) -> bool:
    if variant == "gradient":
        return bool(op.supports_autograd) and dtype is torch.float32
    return {"in place": op.inplace_variant is not None, "out=": bool(op.supports_out)}.get(variant, True)


def sweep(op: Any, dtype: torch.dtype, limit: int, warned: Warned, layouts: Iterable[str] = ALL_LAYOUTS) -> dict[str, Counter[str]]:
    """variant -> count of each outcome, with one example error. If there was a warning, the outcome begins with "warned "."""
    if dtype not in op.supported_dtypes("cpu"):
        return {}
    layouts = [name for name in layouts if name in LAYOUTS or dtype in (torch.float32, torch.int64)]
    samples = [s for s in samples_of(op, dtype, limit) if usable(s)]
    outcomes: dict[str, Counter[str]] = {}
    examples: dict[str, str] = {}
    for layout in layouts:
        sizes = ALL_LAYOUTS[layout]
        variants = [v for v in VARIANTS[: 3 if layout in PENDING else 4] if has(op, v, dtype)]
        ranks: list[list[tuple[str, Outcome]]] = [[] for _ in range(math.prod(sizes))]

        def body(rank: int, world: int, layout: str = layout, variants: list[str] = variants, ranks: Any = ranks) -> None:
            mesh = init_device_mesh("cpu", ALL_LAYOUTS[layout])
            for variant in variants:
                for sample in samples:
                    got = attempt(op, variant, layout, sample, mesh, warned)
                    if got is not None:
                        ranks[rank].append(("pending" if layout in PENDING else variant, got))

        try:
            run_threads(math.prod(sizes), body)
        except RankFailed as error:
            outcomes.setdefault("function", Counter())["WRONG"] += 1
            examples["WRONG"] = str(error)[-300:]
        for row in zip(*ranks, strict=False):
            variant = row[0][0]
            levels = {o[0] for _, o in row}
            if "raised" in levels and len(levels) > 1:
                level, why = "WRONG", "raised on some ranks only: " + next(o[2] for _, o in row if o[0] == "raised")
            else:
                level, why = max((o[0] for _, o in row), key=ORDER.index), next((o[2] for _, o in row if o[2]), "")
            name = f"warned {level}" if level in ("exact", "close", "random", "torch") and any(o[1] for _, o in row) else level
            outcomes.setdefault(variant, Counter())[name] += 1
            if why:
                examples.setdefault(f"{variant}: {level}", f"{layout}: {why}")
    if examples:
        outcomes["examples"] = examples  # type: ignore[assignment]
    return outcomes


def database() -> dict[str, Any]:
    from torch.testing._internal import common_methods_invocations as torchs

    kinds = ("foreach_unary_op_db", "foreach_binary_op_db", "foreach_pointwise_op_db", "foreach_reduce_op_db", "foreach_other_op_db")
    ops = [*torchs.op_db, *(op for kind in kinds for op in getattr(torchs, kind))]
    return {f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}": op for op in ops}


# -- all operations, in processes that may die -----------------------------------------------------------------------------------


def child(names: Sequence[str], dtypes: Sequence[str], limit: int) -> None:
    """Print one line of JSON before and after each operation."""
    torch.set_num_threads(1)
    ops, warned = database(), Warned()
    for name in names:
        print(json.dumps({"at": name}), flush=True)
        started = time.monotonic()
        try:
            found = {d: sweep(ops[name], DTYPES[d], limit, warned) for d in dtypes}
            if "float32" in found:
                print(json.dumps({"at": name}), flush=True)
                add_compiled(found["float32"], name, limit)
            print(json.dumps({"op": name, "found": found, "seconds": round(time.monotonic() - started, 1)}), flush=True)
        except Exception as error:
            print(json.dumps({"op": name, "found": {}, "skipped": f"{type(error).__name__}: {error}"[:200]}), flush=True)


def add_compiled(found: dict[str, Any], name: str, limit: int) -> None:
    from tests.dtensor.op_compiled import compiled  # imports from this module

    outcomes, example = compiled([name], "float32", limit)[name]
    if outcomes:
        found["compiled"] = outcomes
    if example:
        found.setdefault("examples", {})["compiled: WRONG"] = example  # type: ignore[assignment]


def run(results: Path, dtypes: Sequence[str], limit: int, only: Sequence[str] = ()) -> None:
    """Sweep the operations that ``results`` lacks."""
    kept = [row for row in read(results) if not bad(row)]  # repeat the bad ones
    if results.exists():
        results.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    done = {row["op"] for row in kept}
    todo = [name for name in database() if name not in done and (not only or name in only)]
    results.parent.mkdir(parents=True, exist_ok=True)
    while todo:
        command = [sys.executable, "-m", "tests.dtensor.op_coverage", "--child", "--dtypes", ",".join(dtypes), "--samples", str(limit)]
        process = subprocess.Popen(
            [*command, "--ops", "\n".join(todo)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path.cwd()
        )
        assert process.stdout is not None
        last, at = [time.monotonic()], ""

        def watch(process: subprocess.Popen[str] = process, last: list[float] = last) -> None:
            while process.poll() is None:
                time.sleep(1)
                if time.monotonic() - last[0] > SILENCE:
                    process.kill()

        threading.Thread(target=watch, daemon=True).start()
        with results.open("a", encoding="utf-8") as file:
            for line in process.stdout:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                last[0] = time.monotonic()
                if "at" in row:
                    at = row["at"]
                elif "op" in row:
                    todo.remove(row["op"])
                    at = ""
                    file.write(line)
                    file.flush()
            code = process.wait()
            if at:
                what = "HUNG" if code == -9 else "CRASHED"
                file.write(json.dumps({"op": at, "found": {"-": {"function": {what: 1}, "examples": {what: f"exit {code}"}}}}) + "\n")
                todo.remove(at)


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def bad(row: dict[str, Any]) -> bool:
    """True if an operation was silently wrong, hung, crashed, or could not be tried."""
    names = {name for by_variant in row["found"].values() for variant in VARIANTS for name in by_variant.get(variant, {})}
    return bool(names & {"WRONG", "HUNG", "CRASHED"}) or "skipped" in row


def main() -> None:
    from tests.dtensor.op_page import render  # imports from this module

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("build/op-coverage.jsonl"))
    parser.add_argument("--dtypes", default="float32,bfloat16,int64,bool,complex64")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--ops", default="", help="names, one a line; default: all")
    parser.add_argument("--render", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtypes, names = options.dtypes.split(","), [n for n in options.ops.split("\n") if n]
    if options.child:
        child(names, dtypes, options.samples)
        return
    run(options.results, dtypes, options.samples, names)
    if options.render:
        options.render.write_text(render(read(options.results), dtypes, options.samples), encoding="utf-8")


if __name__ == "__main__":
    main()
