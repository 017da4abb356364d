"""Names beside points and lines, none of which covers another."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

WIDTH = 46  # of a name in a key, in letters
STEP = 4  # between the places of a line that names avoid, in points
SHADE = 0.7  # of a colour in which a name is written, so that it can be read on white


def label(
    figure: Any,
    axes: Any,
    points: Mapping[str, tuple[float, float]],
    right: float | None = None,
    size: float = 8,
    colours: Mapping[str, str] | None = None,
    lines: Sequence[Sequence[tuple[float, float]]] = (),
    leads: bool | None = None,
) -> None:
    """Writes names beside points, each moved up or down until it overlaps no name and no point.

    They stay within the height of the axes while there is room.

    Args:
      figure: the figure, complete but for the names.
      axes: the axes of the points.
      points: a point in units of the data, by name.
      right: the limit of the text in points; default the right end of the axes. A name that would
        pass it, or would have to move far, is written to the left of its point.
      size: size of the font in points.
      colours: colour of each name, darkened; default black.
      lines: what a name must not cover either, each as the corners of a line in units of the data.
      leads: whether a line leads to a point that is apart; default where names are black.
    """
    leads = not colours if leads is None else leads
    figure.draw_without_rendering()
    at = {n: axes.transData.transform(p) * 72 / figure.dpi for n, p in points.items()}
    limit = axes.bbox.x1 * 72 / figure.dpi if right is None else right
    taken = [(x - 5, x + 5, y) for x, y in at.values()]
    for corners in lines:
        ends = axes.transData.transform(corners) * 72 / figure.dpi
        taken += [(x, x, y) for x, y in between(ends)]
    start, bottom, _, top = axes.bbox.extents * 72 / figure.dpi
    for name in sorted(points, key=lambda n: (-at[n][1], at[n][0])):
        (x, y), width = at[name], 0.55 * size * len(name)
        tried = []
        for side in (1, -1) if x + 12 + width <= limit else (-1,):
            low, high = sorted((x + 8 * side, x + side * (12 + width)))
            others = [b - y for a, c, b in taken if low <= c and a <= high]
            move = free(others, 1.18 * size, (bottom - y, top - y))
            if side > 0 or low > start or not tried:
                tried.append((abs(move) - 2 * size * side, side, low, high, move))
        _, side, low, high, move = min(tried)
        taken.append((low, high, y + move))
        line = {'arrowstyle': '-', 'color': 'gray', 'lw': 0.5, 'shrinkA': 0}
        axes.annotate(
            name, points[name], xytext=(9 * side, move), textcoords='offset points', va='center',
            ha='left' if side > 0 else 'right', fontsize=size, annotation_clip=False,
            color=dark((colours or {}).get(name, 'black')),
            arrowprops=line if leads and abs(move) > size / 2 else None,
            bbox={'fc': 'white', 'ec': 'none', 'alpha': 0.7, 'pad': 0.2}, zorder=4,
        ).set_in_layout(False)  # fmt: skip


def numbered(
    figure: Any,
    axes: Any,
    key: Any,
    points: Mapping[str, tuple[float, float]],
    colours: Mapping[str, str],
    lines: Sequence[Sequence[tuple[float, float]]] = (),
) -> None:
    """Writes numbers beside points, from left to right, and their names in empty axes.

    Args:
      figure: the figure, complete but for the names.
      axes: the axes of the points.
      key: empty axes for the names.
      points: a point in units of the data, by name.
      colours: of each name.
      lines: what a number must not cover, as for `label`.
    """
    key.axis('off')
    order = {n: f'{i}' for i, n in enumerate(sorted(points, key=lambda n: points[n]), 1)}
    told = {n: textwrap.wrap(n, WIDTH) for n in order}
    height, at = 1 / (1 + sum(map(len, told.values()))), 1.0
    for name, parts in told.items():
        key.text(0.06, at, order[name], ha='right', va='top', size=8, color=dark(colours[name]))
        for part in parts:
            key.text(0.1, at, part, va='top', size=8, color=dark(colours[name]))
            at -= height
    by_number = {order[n]: p for n, p in points.items()}
    shades = {order[n]: c for n, c in colours.items()}
    label(figure, axes, by_number, None, 8, shades, lines, leads=True)


def free(
    heights: Sequence[float], line: float = 10, ends: tuple[float, float] = (-300, 300)
) -> int:
    """The smallest move up or down that keeps a line of text off ``heights``, in points.

    It ends half a line or more within ``ends`` if there is room; without any room it is zero.

    >>> free([0.0, 12.0]), free([0.0, 12.0], ends=(-10, 300))
    (-11, 23)
    """
    moves = sorted(range(-300, 301), key=lambda d: (abs(d), d))
    apart = [d for d in moves if all(abs(d - h) > line for h in heights)]
    inside = (d for d in apart if ends[0] + line / 2 <= d <= ends[1] - line / 2)
    return next(inside, next(iter(apart), 0))


def between(corners: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Places on a line, at most `STEP` apart.

    >>> list(between([(0, 0), (6, 0)]))
    [(0.0, 0.0), (3.0, 0.0), (6.0, 0.0)]
    """
    for a, b in itertools.pairwise(corners):
        count = 2 + int(np.hypot(b[0] - a[0], b[1] - a[1]) / STEP)
        ways = (np.linspace(*pair, count) for pair in zip(a, b, strict=True))
        yield from ((float(x), float(y)) for x, y in zip(*ways, strict=True))


def dark(colour: str) -> tuple[float, ...]:
    """A colour dark enough for small letters.

    >>> dark('white')
    (0.7, 0.7, 0.7)
    """
    from matplotlib.colors import to_rgb

    return tuple(SHADE * part for part in to_rgb(colour))
