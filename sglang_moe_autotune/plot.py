"""A plot: points and bars in, one inline SVG out. Written by hand, as a page that loads nothing needs no library.

Colours come from CSS classes of the page, so that one drawing is good in light and dark.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WIDTH, HEIGHT = 440, 260
"""in units of the drawing: near the width of a phone, so that its text stays readable there"""
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 12, 34


class Scale(NamedTuple):
    """One axis: which value lies at which place of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value; what lies outside is put on the edge."""
        low, high, v = (math.log(max(x, 1e-12)) if self.log else x for x in (self.low, self.high, value))
        share = (v - low) / (high - low) if high > low else 0.5
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values within, at most seven or so."""
        if not self.log:
            return _linear_ticks(self.low, self.high)
        for base, parts in ((10, (1, 2, 5)), (10, (1, 3)), (10, (1,)), (100, (1,)), (1000, (1,))):
            ticks = _log_ticks(self.low, self.high, base, parts)
            if len(ticks) <= 7:
                break
        return ticks


def _linear_ticks(low: float, high: float) -> list[float]:
    span = high - low
    if span <= 1e-12 * max(1.0, abs(low), abs(high)):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / 4))
    step = next(step * f for f in (1, 2, 5, 10) if span / (step * f) <= 5)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, base: int, parts: Sequence[int]) -> list[float]:
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    values = (part * float(base) ** n for n in range(first, last + 1) for part in parts)
    return [v for v in values if low * 0.999 <= v <= high * 1.001]


def tokens(ms: Sequence[int]) -> tuple[Scale, list[float]]:
    """The axis of M, in powers of two, with a tick at every second one or fewer."""
    low, high = min(ms), max(ms)
    scale = Scale(low / 1.2, high * 1.2, _LEFT, WIDTH - _RIGHT, log=True)
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, math.ceil((last - first) / 7))
    return scale, [2.0**n for n in range(first, last + 1, step)] or [float(low)]


def upward(low: float, high: float, *, log: bool = False) -> Scale:
    """A vertical axis with some air above the highest value."""
    if log:
        return Scale(low / 1.15, high * 1.15, HEIGHT - _BOTTOM, _TOP, log=True)
    air = 0.06 * ((high - low) or 1.0)
    return Scale(low - (air if low < 0 else 0.0), high + air, HEIGHT - _BOTTOM, _TOP)


def places(count: int, height: float, *, vertical: bool = False) -> Scale:
    """An axis with a place for each of the numbers from 0 on, from left to right or from top to bottom."""
    ends = (_TOP, height - _BOTTOM) if vertical else (_LEFT, WIDTH - _RIGHT)
    return Scale(-0.5, count - 0.5, *ends)


def height_of(rows: int, each: float) -> float:
    """Of a plot with so many rows."""
    return rows * each + _TOP + _BOTTOM


def across(low: float, high: float) -> Scale:
    """A horizontal axis from the left edge to the right one."""
    return Scale(low, high, _LEFT, WIDTH - _RIGHT)


class Plot:
    """Add marks, then read ``svg``."""

    def __init__(self, label: str, x: Scale, y: Scale, height: float = HEIGHT) -> None:
        """label: what the plot shows, for those who cannot see it."""
        self.x, self.y = x, y
        self._label, self._height = label, height
        self._parts: list[str] = []

    def frame(
        self,
        x_ticks: Iterable[float],
        y_ticks: Iterable[float],
        x_title: str,
        *,
        x_text: Callable[[float], str] = "{:g}".format,
        y_text: Callable[[float], str] = "{:g}".format,
        lines: bool = True,
    ) -> None:
        """Grid lines (unless something else fills the plot), the texts of the ticks, and the title of the x axis."""
        floor = self._height - _BOTTOM
        for value in y_ticks:
            at = self.y.at(value)
            if lines:
                self._parts.append(f'<path class="grid" d="M{_LEFT} {at}H{WIDTH - _RIGHT}"/>')
            self._text(_LEFT - 6, at + 4, y_text(value), "end")
        for value in x_ticks:
            self._text(self.x.at(value), floor + 15, x_text(value), "middle")
        self._text((_LEFT + WIDTH - _RIGHT) / 2, floor + 30, x_title, "middle")

    def line(self, points: Iterable[tuple[float, float]], style: str, *, steps: bool = False) -> None:
        """A line through the points, by x; ``steps`` holds each value until the next."""
        places = [(self.x.at(x), self.y.at(y)) for x, y in sorted(points)]
        if not places:
            return
        path = f"M{places[0][0]} {places[0][1]}"
        path += "".join(f"H{x}V{y}" if steps else f"L{x} {y}" for x, y in places[1:])
        self._parts.append(f'<path class="line {style}" d="{path}"/>')

    def dot(self, x: float, y: float, style: str, says: str, radius: float = 3.2) -> None:
        """A point that says something where a pointer rests on it."""
        place = f'cx="{self.x.at(x)}" cy="{self.y.at(y)}" r="{radius}"'
        self._parts.append(f'<circle class="dot {style}" {place}><title>{escape(says)}</title></circle>')

    def interval(self, x: float, low: float, high: float, style: str) -> None:
        """A vertical bar between two values."""
        at = self.x.at(x)
        self._parts.append(f'<path class="line thin {style}" d="M{at} {self.y.at(low)}V{self.y.at(high)}"/>')

    def bar(self, x: float, y: float, style: str, says: str, width: float = 4.0) -> None:
        """A bar from zero (or from the lowest value of the axis) up to y."""
        at, top = self.x.at(x), self.y.at(y)
        bottom = self.y.at(max(0.0, self.y.low))
        box = f'x="{at - width / 2}" y="{top}" width="{width}" height="{max(0.5, round(bottom - top, 1))}" rx="1"'
        self._parts.append(f'<rect class="bar {style}" {box}><title>{escape(says)}</title></rect>')

    def rule(self, x: float) -> None:
        """A vertical line over the whole height, to compare with."""
        self._parts.append(f'<path class="rule" d="M{self.x.at(x)} {_TOP}V{self._height - _BOTTOM}"/>')

    def strip(self, xs: Iterable[float], y: float, style: str, says: str) -> None:
        """Many points side by side, as one mark: a page may hold ten thousand of them."""
        at = self.y.at(y)
        path = "".join(f"M{x:g} {at:g}h0" for x in sorted({self.x.at(x) for x in xs}))
        self._parts.append(f'<path class="strip {style}" d="{path}"><title>{escape(says)}</title></path>')

    def cell(self, x: float, y: float, style: str, strength: float, text: str, says: str) -> None:
        """A cell of a heat map around whole numbers x and y; strength: 0 to 1."""
        width, height = (abs(axis.at(axis.low + 1) - axis.at(axis.low)) - 2 for axis in (self.x, self.y))
        left, top = self.x.at(x) - width / 2, self.y.at(y) - height / 2
        box = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3"'
        opacity = f'fill-opacity="{0.1 + 0.4 * min(1.0, max(0.0, strength)):.2f}"'
        self._parts.append(f'<rect class="cell {style}" {box} {opacity}><title>{escape(says)}</title></rect>')
        if width > 8 * len(text):
            self._text(self.x.at(x), self.y.at(y) + 4, text, "middle", "figure")

    def _text(self, x: float, y: float, text: str, anchor: str, style: str = "") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"' + (f' class="{style}"' if style else "")
        self._parts.append(f"<text {place}>{escape(text)}</text>")

    @property
    def svg(self) -> str:
        box = f'viewBox="0 0 {WIDTH} {self._height:g}"'
        return f'<svg {box} role="img" aria-label="{escape(self._label)}">{"".join(self._parts)}</svg>'
