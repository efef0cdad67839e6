"""Output of a sharding choice as text, as JSON and as an HTML page with pictures."""

from __future__ import annotations

import html
import io
from typing import Any

from vescale_ray.planner.choose import Choice, Option
from vescale_ray.planner.placement.layout import Layout

SHOWN = 8
"""Options in the text's table; the JSON lists all."""
_COLORS = tuple("#4e79a7 #f28e2b #76b7b2 #edc948 #b07aa1 #ff9da7 #9c755f #59a14f #e15759 #86bcb6 #d4a6c8 #a0cbe8".split())
_PADDING = "#d0d0d0"


def _gib(size: float) -> str:
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
        f"{_gib(room)} usable of {_gib(choice.hardware.memory)}; {policy.optimizer}, {policy.tokens} tokens per device, "
        f"blocks: {policy.block_options[0]}"
    )
    console.print(f"figures: {model.source}; times are estimates", style=None)
    table = Table("", "sharding", "padding", "memory", "step", "exposed", "sent", "why", box=None, pad_edge=False)
    for option in choice.options[:SHOWN]:
        mark = "->" if option is choice.best else ""
        time = option.time
        table.add_row(
            mark, str(option), f"{option.padding_ratio:.2%}", _gib(option.memory.total), f"{time.step:.3g} s", f"{time.exposed:.3g} s",
            _gib(time.sent), option.reason,
        )  # fmt: skip
    console.print(table)
    if len(choice.options) > SHOWN:
        console.print(f"and {len(choice.options) - SHOWN} more options (--json lists all)")
    shown = choice.best or (choice.options[0] if choice.options else None)
    if shown is not None:
        console.print(f"\nmemory of a rank with {shown}")
        memory = Table(box=None, pad_edge=False, show_header=False)
        for kind, size in shown.memory.by_kind().items():
            memory.add_row(kind.replace("_", " "), _gib(size), "(estimate)" if kind == "activations" else "")
        memory.add_row("total", _gib(shown.memory.total), "")
        console.print(memory)
        units = Table("unit", "count", "parameters", "shard", "padding", "bound", "cut", box=None, pad_edge=False)
        for u in shown.plan.units:
            plan = u.plan
            gap = "met" if plan.shard_numel <= plan.bound else f"{plan.shard_numel / max(plan.bound, 1) - 1:.2%} above"
            units.add_row(
                f"{plan.name}" + (f" x {plan.lever.layers}" if plan.lever.layers > 1 else ""), str(u.count), f"{plan.tensor_numel:,}",
                f"{plan.shard_numel:,}", f"{plan.padding_ratio:.3%}", gap, _cuts(plan.buffers),
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


def as_html(choice: Choice) -> str:
    """Return one HTML page: the text, memory by kind for each option, and each unit's layout over the ranks."""
    shown = choice.best or choice.options[0]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{html.escape(choice.model.name)} on {choice.devices} devices</title>",
        "<style>body{font:14px sans-serif;margin:2em;max-width:1200px}pre{overflow-x:auto}svg{display:block;margin:.5em 0 1.5em}</style>",
        f"</head><body><h1>{html.escape(choice.model.name)} on {choice.devices} devices</h1>",
        f"<pre>{html.escape(as_text(choice, 160))}</pre><h2>Memory of a rank</h2>",
        _memory_picture(choice),
        f"<h2>Layout: {html.escape(str(shown))}</h2>",
    ]
    for u in shown.plan.units:
        for k, layout in enumerate(u.plan.buffers):
            which = f", buffer {k + 1} of {len(u.plan.buffers)}" if len(u.plan.buffers) > 1 else ""
            parts.append(
                f"<h3>{html.escape(u.plan.name)}{which}: {layout.num_shards} x {layout.shard_numel:,} elements, "
                f"{layout.padding_ratio:.3%} padding</h3>" + _layout_picture(layout)
            )
    return "\n".join([*parts, "</body></html>"])


def _memory_picture(choice: Choice) -> str:
    options = choice.options[:SHOWN]
    kinds = list(options[0].memory.by_kind())
    most = max(*(o.memory.total for o in options), choice.hardware.memory)
    scale = 700 / most
    rows = []
    for row, option in enumerate(options):
        x, y = 330.0, 30 + row * 26
        rows.append(f"<text x='0' y='{y + 14}' font-size='12'>{html.escape(str(option)[:52])}</text>")
        for kind, color in zip(kinds, _COLORS, strict=False):
            size = option.memory.by_kind()[kind]
            label = f"{kind.replace('_', ' ')}: {_gib(size)}"
            rows.append(f"<rect x='{x:.1f}' y='{y}' width='{size * scale:.1f}' height='20' fill='{color}'><title>{label}</title></rect>")
            x += size * scale
    limit = 330 + choice.hardware.memory * (1 - choice.policy.reserve) * scale
    height = 40 + len(options) * 26
    rows.append(f"<line x1='{limit:.1f}' x2='{limit:.1f}' y1='22' y2='{height - 8}' stroke='black' stroke-dasharray='4'/>")
    legend = "".join(
        f"<rect x='{k * 150}' y='2' width='12' height='12' fill='{c}'/>"
        f"<text x='{k * 150 + 16}' y='13' font-size='12'>{n.replace('_', ' ')}</text>"
        for k, (n, c) in enumerate(zip(kinds, _COLORS, strict=False))
    )
    return f"<svg width='1100' height='{height}' role='img' aria-label='memory by kind'>{legend}{''.join(rows)}</svg>"


def _layout_picture(layout: Layout) -> str:
    """Draw a bar for each of the first ranks and the last: tensors in colours, blocks as lines if there is room, padding grey."""
    ranks = list(range(min(layout.num_shards, 12)))
    if layout.num_shards > 12:
        ranks.append(layout.num_shards - 1)
    if not layout.shard_numel:
        return ""
    scale = 960 / layout.shard_numel
    colors = {name: _COLORS[k % len(_COLORS)] for k, name in enumerate(layout.order)}
    drawn = []
    for row, rank in enumerate(ranks):
        y = row * 24
        drawn.append(f"<text x='0' y='{y + 15}' font-size='12'>rank {rank}</text>")
        drawn.append(f"<rect x='90' y='{y}' width='960' height='20' fill='{_PADDING}'><title>padding</title></rect>")
        for spec in layout.specs:
            start, end = layout.local_range(spec.name, rank)
            if end <= start:
                continue
            x = 90 + layout.shard_offset(spec.name, rank) * scale
            label = f"{spec.name} {list(spec.shape)}: elements {start:,} to {end:,}, cut at {layout.cut(spec.name)}"
            drawn.append(
                f"<rect x='{x:.2f}' y='{y}' width='{(end - start) * scale:.2f}' height='20' fill='{colors[spec.name]}'>"
                f"<title>{html.escape(label)}</title></rect>"
            )
            block = layout.granularity[spec.name]
            if block * scale >= 4:
                drawn += [
                    f"<line x1='{x + at * scale:.2f}' x2='{x + at * scale:.2f}' y1='{y}' y2='{y + 20}' stroke='white' stroke-width='.6'/>"
                    for at in range(block, end - start, block)
                ]
    return f"<svg width='1060' height='{len(ranks) * 24}' role='img' aria-label='which rank holds what'>{''.join(drawn)}</svg>"
