"""`Drawing`: boxes, arrows and labels as SVG, in the colours of the page."""

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

from pictures.palette import FILLS, make_style

_NARROW, _WIDE = "iIljtfr.,:;'|!()[] -", "mwMW@%"
_SIZES = {"small": 12.5, "code": 13.0}


class Drawing:
    """A picture of a width and a height in pixels, with the origin at the top left.

    Text in backticks, as in "calls `touch`", is set as code. Text that is wider than its box, and anything
    outside the picture, raises ValueError.

    Args:
        name: of the file, without its suffix.
        title, description: read out by screen readers.
    """

    def __init__(self, name: str, title: str, description: str, width: int, height: int) -> None:
        self.name = name
        self.title = title
        self.description = description
        self.width = width
        self.height = height
        self.texts: list[str] = []
        self._elements: list[str] = []

    def add_box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: Sequence[str] = (),
        fill: str = "plain",
        *,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle with lines of text in its middle: the first one bold, the others small."""
        if fill not in (*FILLS, "paper"):
            raise ValueError(f"{fill!r} is no fill; there are {', '.join(FILLS)} and paper")
        self._check_inside(x, y, x + width, y + height)
        style = f"box {fill} dashed" if dashed else f"box {fill}"
        self._elements.append(
            f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
        )
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            style = "small" if number else "bold"
            if measure(line, style) > width - 8:
                raise ValueError(f"{line!r} is wider than its box of {width:g}")
            self.add_text(x + width / 2, top + 18 * number, line, style)

    def add_text(self, x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> None:
        """Write a line. `style` is some of bold, small, code, soft; `anchor` is start, middle or end."""
        width = measure(text, style)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        self._check_inside(left, y - 10, left + width, y + 3)
        self.texts.append(text)
        parts = re.split(r"`([^`]*)`", text)
        spans = [
            f'<tspan class="code">{escape(part)}</tspan>' if odd % 2 else escape(part)
            for odd, part in enumerate(parts)
        ]
        style = f' class="{style}"' if style else ""
        self._elements.append(
            f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{"".join(spans)}</text>'
        )

    def add_arrow(self, *points: tuple[float, float], dashed: bool = False, heads: str = "end") -> None:
        """Draw a line through the points, with a head at its `end`, at `both` ends, or `none`."""
        for x, y in points:
            self._check_inside(x, y, x, y)
        style = "line dashed" if dashed else "line"
        marks = {"none": "", "end": " marker-end", "both": " marker-start marker-end"}[heads]
        marks = "".join(f' {mark}="url(#kvp-{self.name}-head)"' for mark in marks.split())
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._elements.append(f'<path class="{style}" d="M{path}"{marks}/>')

    def make_svg(self) -> str:
        """Return the picture, with its own background, so that it is legible on any page."""
        return "\n".join(
            (
                '<svg xmlns="http://www.w3.org/2000/svg" class="kvp" role="img" '
                f'aria-label="{escape(self.title)}" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self.description)}</desc>",
                f"<style>\n{make_style()}\n</style>",
                f'<defs><marker id="kvp-{self.name}-head" class="head" viewBox="0 0 8 8" refX="7" refY="4" '
                'markerWidth="6" markerHeight="6" orient="auto-start-reverse">'
                '<path d="M0 0L8 4L0 8z"/></marker></defs>',
                f'<rect class="paper" width="{self.width}" height="{self.height}" rx="8"/>',
                *self._elements,
                "</svg>",
                "",
            )
        )

    def _check_inside(self, left: float, top: float, right: float, bottom: float) -> None:
        if left < 0 or top < 0 or right > self.width or bottom > self.height:
            raise ValueError(
                f"{self.name}: from {left:g}, {top:g} to {right:g}, {bottom:g} is not inside of "
                f"{self.width} x {self.height}"
                + (f"; the last text is {self.texts[-1]!r}" if self.texts else "")
            )


def measure(text: str, style: str = "") -> float:
    """Return an upper estimate of a line's width in pixels, for the fonts that browsers may choose."""
    size = min((_SIZES[each] for each in style.split() if each in _SIZES), default=14.0)
    width = 0.0
    for odd, part in enumerate(re.split(r"`([^`]*)`", text)):
        if odd % 2 or "code" in style:
            width += 0.61 * 13 * len(part)
        else:
            width += size * sum(0.36 if char in _NARROW else 0.95 if char in _WIDE else 0.6 for char in part)
    return width * (1.06 if "bold" in style else 1.0)
