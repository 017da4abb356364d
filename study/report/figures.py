"""The pictures of a study: curves as in the paper's figures, and scores against bits per element.

A picture file has a digest of its data and of the code that draws it, and is drawn again if either
has changed. A report that is written twice is therefore the same to the byte, and an outdated
picture is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp.pictures import style
from study.report import captions, epochs, gap, points
from study.report.paper import PAPER
from study.report.results import Row, Study
from study.report.tables import shown

HEADLINE = {  # the rows of the README's picture, by study
    'mnist': ('none', 'fw4-bw8', 'fw4-bw6', 'top30', 'top20', 'top10', 'aqsgd-top20-warm10'),
    'few_bits_mnist': ('top10-fp16', 'top40-log4', 'block2', 'block4', 'trellis2', 'lloyd4'),
}
CODE = [str(m.__file__) for m in (captions, epochs, gap, points)]


class Picture(NamedTuple):
    """A picture of a report before it is drawn.

    Attributes:
      title: title in the report.
      file: name of the file.
      data: the data that is drawn.
      paint: ``figure -> None``, which draws the data.
      size: width and height in inches.
    """

    title: str
    file: str
    data: Any
    paint: Callable[[Any], None]
    size: tuple[float, float]


def draw(study: Study, out: Path) -> dict[str, str]:
    """Draws the pictures of ``study`` that ``out`` lacks; returns file names by title."""
    return {picture.title: put(picture, out) for picture in pictures(study)}


def put(picture: Picture, out: Path) -> str:
    """Draws a picture if ``out`` lacks it; returns the name of its file."""
    path, mark = out / picture.file, style.digest([picture.data, picture.size], __file__, *CODE)
    if not style.holds(path, mark):
        with style.style():
            figure = style.figure(*picture.size)
            picture.paint(figure)
            style.save(figure, path, mark)
    return picture.file


def across(studies: list[Study]) -> Iterator[Picture]:
    """The pictures of several studies together for which they have the data."""
    if rows := [s.rows[n] for s in studies for n in HEADLINE.get(s.name, ()) if n in s.rows]:
        yield scores(rows, 'Some channels of the paper and others', 'headline.png', (11, 5.4))
    if data := gap.gap(studies):
        yield Picture(gap.TITLE, 'gap.png', data, lambda figure: gap.paint(figure, data), (11, 5.4))


def scores(rows: list[Row], title: str, file: str, size: tuple[float, float]) -> Picture:
    """Rows of one measure against their bits per element."""
    data = points.points(rows)
    return Picture(title, file, data, lambda figure: points.paint(figure, data), size)


def pictures(study: Study) -> Iterator[Picture]:
    """All pictures for which a study has data."""
    for table in PAPER['tables']:
        own = [row for _, _, row in shown(table, study) if row]
        beside = [study.rows[n] for n in table.get('beside', ()) if own and n in study.rows]
        rows = [row for row in (*own[:1], *beside, *own[1:]) if epochs.number(row) > 1]
        if len(rows) > 1:  # besides the row without compression
            data = epochs.curves(rows)
            file = f'{study.name}_figure{table["table"] + 1}.png'
            paint = lambda figure, d=data: epochs.paint(figure, d)
            yield Picture(table['figure'], file, data, paint, (10, 7.4))
    for measure in ('accuracy', 'perplexity'):
        rows = [r for r in study.rows.values() if r.measure == measure]
        if len(rows) > 1:
            title = f'{measure.capitalize()} against bits per element'
            yield scores(rows, title, f'{study.name}_{measure}_bits.png', (11, 6.4))
