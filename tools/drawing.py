"""A drawing in SVG, line by line: enough for boxes, bars, arrows and labels, and the same text each time it is made."""

from __future__ import annotations

from html import escape

__all__ = ["BLUE", "GREY", "INK", "ORANGE", "PALE", "Drawing"]

INK, GREY, PALE = "#222222", "#8a8a8a", "#f2f4f8"
BLUE, ORANGE = "#0072b2", "#e69f00"


class Drawing:
    """Shapes on a white ground. Sizes are in pixels; `title` is what a screen reader says."""

    def __init__(self, width: float, height: float, title: str):
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{GREY}"/></marker></defs>',
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff" rx="6"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none", rx: float = 3
    ) -> None:
        """A rectangle; `x` and `y` are its upper left corner."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{rx:g}" fill="{fill}" '
            f'stroke="{edge}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        fill: str = INK,
        anchor: str = "start",
        size: float = 13,
        bold: bool = False,
    ) -> None:
        """A line of text whose base line begins, ends or is centred at a point."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size:g}"{weight}>'
            f"{escape(text)}</text>"
        )

    def line(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        *,
        edge: str = GREY,
        dashed: bool = False,
        arrow: bool = False,
    ) -> None:
        """A straight line."""
        more = (' stroke-dasharray="4 3"' if dashed else "") + (' marker-end="url(#head)"' if arrow else "")
        self._parts.append(f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}" fill="none" stroke="{edge}"{more}/>')

    def curve(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """An arrow that leaves downwards and arrives from above."""
        half = (y + to_y) / 2
        path = f"M{x:.1f} {y:.1f} C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {to_y:.1f}"
        self._parts.append(f'<path d="{path}" fill="none" stroke="{GREY}" marker-end="url(#head)"/>')

    def bow(self, x: float, y: float, to_x: float, to_y: float, bend: float) -> None:
        """An arrow that leaves and arrives sideways, around what lies between; `bend` is how far out it goes."""
        out = (min if bend < 0 else max)(x, to_x) + bend
        path = f"M{x:.1f} {y:.1f} C{out:.1f} {y:.1f} {out:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
        self._parts.append(f'<path d="{path}" fill="none" stroke="{GREY}" marker-end="url(#head)"/>')

    def svg(self) -> str:
        """The drawing as the text of a file."""
        return "\n".join([*self._parts, "</svg>", ""])
