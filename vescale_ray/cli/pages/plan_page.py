"""The page of a sharding choice, for ``vescale-ray plan --html``: the text, memory by kind, and which rank holds what."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import cycle

from vescale_ray.cli.pages.svg import PALETTE, element, picture, text, upright
from vescale_ray.planner.choice_report import SHOWN, as_text, gib
from vescale_ray.planner.choose import Choice
from vescale_ray.planner.placement.layout import Layout

PADDING = "#d0d0d0"
LEFT, WIDE, ROW, BAR = 330, 1060, 24, 20
"""Positions in pixels: where bars of memory begin, the width of a picture, the height of a row and of its bar."""

_STYLE = "body{font:14px sans-serif;margin:2em;max-width:1200px}pre{overflow-x:auto}svg{width:100%;display:block}svg text{font-size:12px}"


def render(choice: Choice) -> str:
    """Return the page as HTML."""
    shown = choice.best or choice.options[0]
    title = escape(f"{choice.model.name} on {choice.devices} devices")
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>',
        f"<body><h1>{title}</h1><pre>{escape(as_text(choice, 160))}</pre><h2>Memory of a rank</h2>",
        _memory(choice),
        f"<h2>Layout: {escape(str(shown))}</h2>",
    ]
    for u in shown.plan.units:
        for k, layout in enumerate(u.plan.buffers):
            which = f", buffer {k + 1} of {len(u.plan.buffers)}" if len(u.plan.buffers) > 1 else ""
            size = f"{layout.num_shards} x {layout.shard_numel:,} elements, {layout.padding_ratio:.3%} padding"
            parts.append(f"<h3>{escape(u.plan.name)}{which}: {size}</h3>{_ranks(layout)}")
    return "\n".join([*parts, "</body></html>\n"])


def _memory(choice: Choice) -> str:
    """Draw a bar of each option's memory by kind, with the limit as a dashed line."""
    options = choice.options[:SHOWN]
    colours = dict(zip(options[0].memory.by_kind(), PALETTE, strict=False))
    scale = (WIDE - LEFT) / max(*(o.memory.total for o in options), choice.hardware.memory)
    parts = []
    for k, (kind, colour) in enumerate(colours.items()):
        parts += [element("rect", x=k * 150, y=2, width=12, height=12, fill=colour), text(k * 150 + 16, 13, kind.replace("_", " "))]
    for row, option in enumerate(options):
        x, y = float(LEFT), 30 + row * ROW
        parts.append(text(0, y + 14, str(option)[:52]))
        for kind, size in option.memory.by_kind().items():
            label = f"{kind.replace('_', ' ')}: {gib(size)}"
            parts.append(element("rect", label, x=x, y=y, width=size * scale, height=BAR, fill=colours[kind]))
            x += size * scale
    height = 40 + len(options) * ROW
    limit = LEFT + choice.hardware.memory * (1 - choice.policy.reserve) * scale
    return picture(WIDE, height, "memory by kind", [*parts, upright(limit, 22, height - 8, stroke="black", stroke_dasharray="4")])


def _ranks(layout: Layout) -> str:
    """Draw a bar for each of the first 12 ranks and the last: tensors in colours, blocks as lines if there is room, padding grey."""
    ranks = sorted({*range(min(layout.num_shards, 12)), layout.num_shards - 1})
    return picture(WIDE, len(ranks) * ROW, "which rank holds what", _bars(layout, ranks)) if layout.shard_numel else ""


def _bars(layout: Layout, ranks: list[int]) -> Iterator[str]:
    scale = (WIDE - 100) / layout.shard_numel
    colours = dict(zip(layout.order, cycle(PALETTE), strict=False))
    for row, rank in enumerate(ranks):
        y = row * ROW
        yield text(0, y + 15, f"rank {rank}")
        yield element("rect", "padding", x=90, y=y, width=WIDE - 100, height=BAR, fill=PADDING)
        for spec in layout.specs:
            start, end = layout.local_range(spec.name, rank)
            if end <= start:
                continue
            x = 90 + layout.shard_offset(spec.name, rank) * scale
            label = f"{spec.name} {list(spec.shape)}: elements {start:,} to {end:,}, cut at {layout.cut(spec.name)}"
            yield element("rect", label, x=x, y=y, width=(end - start) * scale, height=BAR, fill=colours[spec.name])
            block = layout.granularity[spec.name]
            if block * scale >= 4:
                for at in range(block, end - start, block):
                    yield upright(x + at * scale, y, y + BAR, stroke="white", stroke_width=0.6)
