"""Draws docs/figures/architecture.svg, the picture of the README and of the front page.

    python docs/site/picture.py

The drawing has a ground of its own, light or dark as the reader's system is, so that it is legible on any page.
"""

from __future__ import annotations

import itertools
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "figures" / "architecture.svg"
WIDTH, HEIGHT = 880, 430
STYLE = """
    .ground { fill: #fbfbfd; stroke: #d5d8e0; }
    .cell { fill: #e9ecf3; stroke: #9aa3b5; }
    .here { fill: #ffd9a0; stroke: #b86e00; }
    .box { fill: #eef1f7; stroke: #8a93a6; }
    .sa { fill: #d5e6ff; stroke: #1f62c4; } .sa-line { stroke: #1f62c4; fill: none; } .sa-text { fill: #1f62c4; }
    .da { fill: #fbdcec; stroke: #b42372; } .da-line { stroke: #b42372; fill: none; } .da-text { fill: #b42372; }
    .ea { fill: #d6f1df; stroke: #1c7f47; } .ea-text { fill: #1c7f47; }
    .line { stroke: #5a6375; fill: none; }
    text { fill: #1d2330; font: 15px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; text-anchor: middle; }
    .small { font-size: 13px; } .left { text-anchor: start; } .title { font-weight: 600; }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #171b24; stroke: #3a4254; }
      .cell { fill: #262d3b; stroke: #6b768c; }
      .here { fill: #7a4a00; stroke: #ffb44a; }
      .box { fill: #202634; stroke: #76819a; }
      .sa { fill: #173a70; stroke: #7db3ff; } .sa-line { stroke: #7db3ff; } .sa-text { fill: #9cc5ff; }
      .da { fill: #5c1840; stroke: #ff8cc4; } .da-line { stroke: #ff8cc4; } .da-text { fill: #ffa6d2; }
      .ea { fill: #12472a; stroke: #6fdc9b; } .ea-text { fill: #8be7b0; }
      .line { stroke: #a3adc0; }
      text { fill: #e8ebf2; }
    }
"""
ARROWS = "".join(
    f'<marker id="{name}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    f'<path class="{kind}-line" d="M1 1 L7 4 L1 7" stroke-width="1.6"/></marker>'
    for name, kind in (("sa", "sa"), ("da", "da"))
)
ARROWS += (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="line" d="M1 1 L7 4 L1 7" stroke-width="1.6"/></marker>'
)
TOKENS = ("((", "T", "&amp;", "F")
COLUMNS = [96 + 92 * i for i in range(4)]
ROWS = [292 - 62 * depth for depth in range(4)]
HERE = (3, 2)
"""The token and the depth whose view is drawn."""


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A box with round corners."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7" stroke-width="1.4"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text around x."""
    return f'<text class="{kind}" x="{x}" y="{y}">{words}</text>'


def arrow(path: str, kind: str = "line") -> str:
    """A path that ends in the head of an arrow."""
    head = "head" if kind == "line" else kind.replace("-line", "-head")
    return f'<path class="{kind}" d="{path}" stroke-width="1.7" marker-end="url(#{head})"/>'


def grid() -> list[str]:
    """Tokens beside each other, depths above each other, and what one state looks back at."""
    parts = [text(240, 36, "one layer, applied L times", "title")]
    for at, (x, token) in enumerate(zip(COLUMNS, TOKENS, strict=True)):
        parts += [text(x, 372, token), arrow(f"M{x} 354 V{ROWS[0] + 19}")]
        for depth, y in enumerate(ROWS):
            kind = "here" if (at, depth) == HERE else "cell"
            parts.append(rect(x - 27, y - 16, 54, 32, kind))
            if at < HERE[0]:
                parts.append(text(x, y + 5, f"x<tspan dy='4' font-size='10'>{depth}</tspan>", "small"))
        if at < HERE[0]:
            parts += [arrow(f"M{x} {low - 17} V{high + 19}") for low, high in itertools.pairwise(ROWS)]
    x, y = COLUMNS[HERE[0]], ROWS[HERE[1]]
    parts.append(text(x, y + 5, "here", "small"))
    for at in range(HERE[0]):
        bend = y - 34 - 5 * (HERE[0] - at)
        parts.append(arrow(f"M{COLUMNS[at]} {y - 17} Q{(COLUMNS[at] + x) / 2} {bend} {x - 22} {y - 15}", "sa-line"))
    for depth in range(HERE[1]):
        bend = x + 40 + 14 * (HERE[1] - depth)
        parts.append(arrow(f"M{x + 28} {ROWS[depth]} Q{bend} {(ROWS[depth] + y) / 2} {x + 29} {y + 6}", "da-line"))
    for depth, low in enumerate(ROWS):
        parts.append(text(46, low + 5, f"l = {depth}", "small"))
    return [*parts, text(240, 404, "sequence", "small"), *key()]


def key() -> list[str]:
    """What the colours of the arrows mean."""
    return [
        text(180, 72, "attention over the sequence (SA)", "small sa-text"),
        text(378, 72, "over depth (DA)", "small da-text"),
    ]


def layer() -> list[str]:
    """What the one layer is made of."""
    centre = 668
    parts = [text(centre, 36, "the layer", "title"), rect(500, 72, 336, 262, "ground")]
    parts += [text(centre, 404, "state x of every token", "small"), arrow(f"M{centre} 388 V322")]
    parts += [rect(520, 252, 140, 50, "sa"), text(590, 273, "SA"), text(590, 291, "earlier tokens", "small")]
    parts += [rect(676, 252, 140, 50, "da"), text(746, 273, "DA"), text(746, 291, "earlier depths", "small")]
    parts += ['<path class="line" d="M590 304 V320 H746 V304" stroke-width="1.7"/>']
    parts += ['<path class="line" d="M590 250 V236 H746 V250" stroke-width="1.7"/>']
    parts += [arrow(f"M{centre} 236 V194"), text(centre + 14, 219, "added to x", "small left")]
    parts += [rect(520, 112, 296, 80, "box"), text(centre, 134, "EA: the k best of E experts, added to x", "small")]
    for at in range(12):
        chosen = at in (3, 8)
        parts.append(rect(534 + 23 * at, 148, 17, 30, "ea" if chosen else "cell"))
    parts += [arrow(f"M{centre} 112 V50")]
    parts += [arrow("M668 92 H854 V362 H672"), text(846, 60, "L times", "small")]
    return parts


def picture() -> str:
    """The SVG."""
    label = (
        "Left: tokens side by side and depths above one another; a state looks back over earlier tokens at its depth "
        "and over its own earlier depths. Right: the one layer, attention over sequence and depth, then experts."
    )
    parts = [rect(1, 1, WIDTH - 2, HEIGHT - 2, "ground"), *grid(), *layer()]
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n'
        f"  <style>{STYLE}  </style>\n  <defs>{ARROWS}</defs>\n  {body}\n</svg>\n"
    )


if __name__ == "__main__":
    OUT.write_text(picture(), encoding="utf-8")
