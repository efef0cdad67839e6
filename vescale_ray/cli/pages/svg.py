"""Elements of SVG pictures, as text. All pictures of the pages are made of them."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

PALETTE = "#3274d9 #e0752d #2e8b57 #a352cc #c0392b #0f8a9d #b5891b #6d7683 #d6529c #5b8c2a #7b61d1 #8a5a3c".split()
GOOD, BAD = PALETTE[2], PALETTE[4]


def picture(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """Return a picture. The page's style sets its size. ``label`` is for screen readers."""
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def element(tag: str, title: str = "", **attributes: str | float) -> str:
    """Return one element; numbers are rounded to hundredths, and ``stroke_width`` becomes ``stroke-width``.

    ``title`` is shown while the pointer is on the element.
    """
    named = "".join(f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"' for name, value in attributes.items())
    return f"<{tag}{named}><title>{escape(title)}</title></{tag}>" if title else f"<{tag}{named}/>"


def upright(x: float, top: float, bottom: float, title: str = "", **attributes: str | float) -> str:
    """Return a vertical line."""
    return element("line", title, x1=x, x2=x, y1=top, y2=bottom, **attributes)


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return a text on the base line ``y``. ``anchor`` tells which part of the text is at ``x``: ``start``, ``middle`` or ``end``."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
