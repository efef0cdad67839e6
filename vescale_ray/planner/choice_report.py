"""Output of a sharding choice as text and as JSON."""

from __future__ import annotations

import io
from typing import Any

from vescale_ray.planner.choose import Choice, Option
from vescale_ray.planner.placement.layout import Layout

SHOWN = 8
"""Options in the text's table; the JSON lists all."""


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"


def as_text(choice: Choice, width: int = 140) -> str:
    """Return the tables as text for a terminal of ``width`` columns."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    model, policy = choice.model, choice.policy
    room = choice.hardware.memory * (1 - policy.reserve)
    console.print(
        f"{model.name}: {model.numel:,} parameters, {model.active:,} active; {choice.devices} x {choice.hardware.name}, "
        f"{gib(room)} usable of {gib(choice.hardware.memory)}; {policy.optimizer}, {policy.tokens} tokens per device, "
        f"blocks: {policy.block_options[0]}" + (f", FP8 codes in tiles: {policy.quantize}" if policy.quantize is not None else "")
        + (f", {policy.expert_parallel} ranks share the experts" if policy.expert_parallel > 1 else "")
    )
    console.print(f"figures: {model.source}; times are estimates", style=None)
    table = Table("", "sharding", "padding", "memory", "step", "exposed", "sent", "why", box=None, pad_edge=False)
    for option in choice.options[:SHOWN]:
        mark = "->" if option is choice.best else ""
        time = option.time
        table.add_row(
            mark, str(option), f"{option.padding_ratio:.2%}", gib(option.memory.total), f"{time.step:.3g} s", f"{time.exposed:.3g} s",
            gib(time.sent), option.reason,
        )  # fmt: skip
    console.print(table)
    if len(choice.options) > SHOWN:
        console.print(f"and {len(choice.options) - SHOWN} more options (--json lists all)")
    shown = choice.best or (choice.options[0] if choice.options else None)
    if shown is not None:
        console.print(f"\nmemory of a rank with {shown}")
        memory = Table(box=None, pad_edge=False, show_header=False)
        scales = gib(sum(u.scale_bytes * u.count for u in shown.plan.units))
        remarks = {"activations": "(estimate)", "codes": f"({scales} of them scales)"}
        for kind, size in ((kind, size) for kind, size in shown.memory.by_kind().items() if size or kind not in ("codes", "casts")):
            memory.add_row(kind.replace("_", " "), gib(size), remarks.get(kind, ""))
        memory.add_row("total", gib(shown.memory.total), "")
        console.print(memory)
        units = Table("unit", "count", "parameters", "shard", "padding", "bound", "cut", box=None, pad_edge=False)
        for u in shown.plan.units:
            plan = u.plan
            gap = "met" if plan.shard_numel <= plan.bound else f"{plan.shard_numel / max(plan.bound, 1) - 1:.2%} above"
            units.add_row(
                f"{plan.name}" + (f", 1 of {u.shares.parts} parts over {u.group} ranks" if u.shares.parts > 1 else "")
                + (" in FP8" if u.coded is not None else "") + (f" x {plan.lever.layers}" if plan.lever.layers > 1 else ""),
                str(u.count), f"{plan.tensor_numel:,}", f"{plan.shard_numel:,}", f"{plan.padding_ratio:.3%}", gap, _cuts(plan.buffers),
            )  # fmt: skip
        console.print()
        console.print(units)
    for note in choice.notes:
        console.print(f"note: {note}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _cuts(buffers: tuple[Layout, ...]) -> str:
    counts: dict[str, int] = {}
    for layout in buffers:
        for spec in layout.specs:
            cut = layout.cut(spec.name)
            counts[cut] = counts.get(cut, 0) + 1
    return ", ".join(f"{n} at {cut}" for cut, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def as_json(choice: Choice) -> dict[str, Any]:
    """Return the whole choice in plain values; ``options[0]`` is the best option if one fits."""
    return {
        "model": choice.model.name,
        "parameters": choice.model.numel,
        "active_parameters": choice.model.active,
        "source": choice.model.source,
        "devices": choice.devices,
        "hardware": choice.hardware.name,
        "memory_bytes": choice.hardware.memory,
        "optimizer": choice.policy.optimizer,
        "expert_parallel": choice.policy.expert_parallel,
        "quantize": str(choice.policy.quantize) if choice.policy.quantize is not None else None,
        "blocks": [str(rule) for rule in choice.policy.block_options],
        "fits": choice.best is not None,
        "best": _option(choice.best) if choice.best is not None else None,
        "options": [_option(option) for option in choice.options],
        "notes": list(choice.notes),
    }


def _option(option: Option) -> dict[str, Any]:
    time = option.time
    return {
        "shard_group": option.group,
        "replicas": option.replicas,
        "blocks": str(option.blocks),
        "layers_per_unit": option.lever.layers,
        "buffers": option.lever.buffers,
        "strided_experts": option.lever.strided,
        "padding_ratio": option.padding_ratio,
        "memory_bytes": {**option.memory.by_kind(), "total": option.memory.total},
        "step_seconds": time.step,
        "exposed_seconds": time.exposed,
        "compute_seconds": time.compute,
        "sent_bytes": time.sent,
        "reason": option.reason,
        "units": [
            {
                "name": u.plan.name,
                "count": u.count,
                "layers": u.plan.lever.layers,
                "fp8": u.coded is not None,
                "scale_bytes": u.scale_bytes,
                "ranks": u.group,
                "parts": u.shares.parts,
                "parameters": u.plan.tensor_numel,
                "shard_numel": u.plan.shard_numel,
                "lower_bound": u.plan.bound,
                "padding_ratio": u.plan.padding_ratio,
                "gaps_in_rows": u.plan.strided,
                "fingerprint": u.plan.fingerprint,
            }
            for u in option.plan.units
        ],
    }
