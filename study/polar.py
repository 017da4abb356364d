"""`python -m study polar ROWS.jsonl ... --out NAME`: a report on polar codes.

It writes NAME.md, NAME.png and NAME.svg from the rows of bench/polar.py and bench/gradients.py:
distortion against rate, the thesis's table, speed, gradient codecs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmp.pictures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Line = dict[str, Any]  # of a file that a bench wrote

# Targets for the mean distortion at rates .1 .3 .5 .7 .9, and for nanoseconds per source bit.
BARS = {
    (1024, 'argmax'): (0.3373, 0.2093, 0.1264, 0.0655, 0.0179),
    (1024, 'scl(8)'): (0.3293, 0.2012, 0.1193, 0.0605, 0.0170),
    (1024, 'randomised'): (0.3459, 0.2203, 0.1353, 0.0707, 0.0197),
    (2048, 'argmax'): (0.3343, 0.2062, 0.1237, 0.0632, 0.0171),
    (2048, 'scl(8)'): (0.3276, 0.1991, 0.1177, 0.0591, 0.0161),
}
WITHIN = 0.01  # allowed relative difference from the target, for randomised rounding
SPEED = {'encode_ns': 200.0, 'decode_ns': 20.0}
ERRORS = {  # targets for the relative squared error on normal data, to three digits
    'polar(0.1)': 0.893,
    'polar(0.25)': 0.739,
    'polar(0.5)': 0.537,
    'polar(0.1, search=scl(8))': 0.884,
    'polar(0.25, search=scl(8))': 0.725,
    'polar(0.5, search=scl(8))': 0.525,
}
THEIR_BLOCKS = 3
SAME = 0.001  # significance level of the test that the thesis's code is the same as ours


def load(paths: Sequence[Path]) -> list[Line]:
    """The rows of all files.

    Raises:
      ValueError: if a file has no rows of `bench/polar.py` or `bench/gradients.py`.
    """
    rows = []
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = {r.get('kind') for r in lines}
        if not kinds & {'distortion', 'speed', 'codec'}:
            raise ValueError(
                f'{path} has no rows about polar codes (kinds {sorted(map(str, kinds))}); '
                'give files that bench/polar.py or bench/gradients.py wrote'
            )
        rows += lines
    return rows


def _of(rows: Sequence[Line], kind: str) -> list[Line]:
    return [r for r in rows if r['kind'] == kind]


def markdown(rows: Sequence[Line]) -> Iterator[str]:
    """The lines of the page."""
    yield from ('# Polar codes as a lossy source code', '')
    yield from _runs(_of(rows, 'run'))
    if of_kind := _of(rows, 'distortion'):
        yield from _distortion(of_kind)
        if theirs := [r for r in of_kind if 'thesis' in r]:
            yield from _thesis(theirs)
    if of_kind := _of(rows, 'speed'):
        yield from _speed(of_kind, _of(rows, 'construction'))
    if of_kind := _of(rows, 'codec'):
        yield from _codecs(of_kind, _of(rows, 'scalars'))


def _runs(rows: Sequence[Line]) -> Iterator[str]:
    """One line per script, commit and machine; the rows have the full commands."""
    calls = [(r['command'].split()[0], r['commit'], r['hardware'], _versions(r)) for r in rows]
    for call in dict.fromkeys(calls):
        script, commit, hardware, versions = call
        yield f'* `{script}`, {calls.count(call)} call(s): commit {commit}, {hardware}, {versions}'


def _versions(row: Line) -> str:
    return ', '.join(f'{name} {version}' for name, version in row['versions'].items())


def _distortion(rows: Sequence[Line]) -> Iterator[str]:
    searches = list(dict.fromkeys((r['search'], r['construction']) for r in rows))
    blocks = sorted({r['blocks'] for r in rows})
    yield from ('', '## Distortion of fair bits', '')
    yield f'Fraction of wrong bits ± standard error over {", ".join(map(str, blocks))} blocks.'
    yield 'Frozen inputs by `genie`, or by the Bhattacharyya bound (*bound*). Each word was'
    yield 'checked to be one of the code. In bold: a target is set and met.'
    yield from ('', '| N | rate | Shannon | ' + ' | '.join(_title(*s) for s in searches) + ' |')
    yield '|--:|--:|--:|' + '--:|' * len(searches)
    cells = {(r['size'], r['rate'], r['search'], r['construction']): r for r in rows}
    for size, rate in sorted({(r['size'], r['rate']) for r in rows}):
        line = [cells[size, rate, *s] for s in searches if (size, rate, *s) in cells]
        yield f'| {size} | {rate} | {line[0]["bound"]:.4f} | ' + ' | '.join(map(_cell, line)) + ' |'
    below = [r for r in rows if r['mean'] < r['bound']]
    missed = [r for r in rows if verdict(r) is False]
    set_ = [r for r in rows if verdict(r) is not None]
    yield from ('', f'* Targets: {len(set_) - len(missed)} of {len(set_)} met.')
    yield f'* Means below the Shannon bound: {len(below)} of {len(rows)}.'


def _title(search: str, construction: str) -> str:
    return search if construction == 'genie' else f'{search}, *bound*'


def verdict(row: Line) -> bool | None:
    """Whether a distortion meets its target; None if there is none."""
    bars = BARS.get((row['size'], row['search']))
    rates = (0.1, 0.3, 0.5, 0.7, 0.9)
    if bars is None or row['construction'] != 'genie' or row['rate'] not in rates:
        return None
    bar = bars[rates.index(row['rate'])]
    if row['search'] == 'randomised':
        return abs(row['mean'] / bar - 1) <= WITHIN
    return row['mean'] <= bar


def _cell(row: Line) -> str:
    text = f'{row["mean"]:.4f} ± {row["error"]:.5f}'
    return {True: f'**{text}**', False: f'{text} FAIL', None: text}[verdict(row)]


def _thesis(rows: Sequence[Line]) -> Iterator[str]:
    from scipy.special import chdtrc

    yield from ('', "## The thesis's setting", '')
    yield f'Randomised rounding, Bhattacharyya construction. Theirs: {THEIR_BLOCKS} blocks per'
    yield 'cell. z: (theirs - ours) over the standard error of that difference.'
    yield from ('', '| N | rate | theirs | ours | z |', '|--:|--:|--:|--:|--:|')
    scores = []
    for r in rows:
        z = (r['thesis'] - r['mean']) / np.hypot(r['deviation'] / THEIR_BLOCKS**0.5, r['error'])
        scores.append(z)
        ours = f'{r["mean"]:.4f} ± {r["error"]:.5f}'
        yield f'| {r["size"]} | {r["rate"]} | {r["thesis"]:.4f} | {ours} | {z:+.1f} |'
    square = float(np.sum(np.square(scores)))
    chance = float(chdtrc(len(scores), square))
    same = 'consistent with the same code' if chance > SAME else 'theirs is another code than ours'
    yield from (
        '',
        f'* Chi-square over the {len(scores)} cells {square:.1f}, p = {chance:.0e}: {same}',
    )
    yield f'  (at most {np.max(np.abs(scores)):.1f} standard errors in a cell).'


def _passed(passed: bool) -> str:
    return 'pass' if passed else 'FAIL'


def _speed(rows: Sequence[Line], constructions: Sequence[Line]) -> Iterator[str]:
    r = rows[0]
    yield from ('', '## Speed', '')
    yield f'Whole codecs, CPU-nanoseconds per source bit: N = {r["size"]}, {r["blocks"]} blocks,'
    yield f'one core, best of {r["repeats"]} interleaved runs; compilation in CPU-seconds.'
    yield from ('', '| codec | encode ns | decode ns | compile encoder s | compile decoder s |')
    yield '|---|--:|--:|--:|--:|'
    for r in rows:
        times = f'{r["encode_ns"]:.1f} | {r["decode_ns"]:.1f}'
        compiling = f'{r["compile_encode_s"]:.1f} | {r["compile_decode_s"]:.1f}'
        yield f'| `{r["codec"]}` | {times} | {compiling} |'
    yield ''
    for end, bar in SPEED.items():
        ns, word = rows[0][end], end.removesuffix('_ns')
        yield f'* {_passed(ns <= bar)}: `{rows[0]["codec"]}` {word} {ns:.1f} ns <= {bar:.0f}'
    took = ', '.join(f'{c["seconds"]:.2f} (N = {c["size"]})' for c in constructions)
    yield f'* Construction by `genie`, once per code and process, seconds: {took}.'


def _codecs(rows: Sequence[Line], scalars: Sequence[Line]) -> Iterator[str]:
    vectors = list(dict.fromkeys(r['vector'] for r in rows))
    yield from ('', '## Gradient codecs', '')
    yield f'One message of {rows[0]["elements"]} elements: bits per element,'
    yield '`|x - C(x)|^2 / |x|^2`, CPU-nanoseconds per element on one core. Shannon: the least'
    yield 'possible error on normal data with these bits, `2^(-2 bits)`.'
    yield from ('', f'| codec | bits | Shannon | {" | ".join(vectors)} | encode ns | decode ns |')
    yield '|---|--:|--:|' + '--:|' * (len(vectors) + 2)
    for r in {r['bits']: r for r in scalars}.values():
        line = f'{r["bits"]:.3f} | {2 ** (-2 * r["bits"]):.4f} | {r["nmse"]:.4f}'
        yield f'| *best entropy-coded scalars* | {line} |' + ' |' * (len(vectors) + 1)
    cells = {(r['codec'], r['vector']): r for r in rows}
    for codec in dict.fromkeys(r['codec'] for r in rows):
        line_cells = [cells[codec, v] for v in vectors]
        errors = ' | '.join(f'{r["nmse"]:.4g}' for r in line_cells)
        bits, times = (
            line_cells[0]['bits'],
            f'{line_cells[0]["encode_ns"]:.1f} | {line_cells[0]["decode_ns"]:.1f}',
        )
        yield f'| `{codec}` | {bits:.3f} | {2 ** (-2 * bits):.4g} | {errors} | {times} |'
    yield ''
    for codec, bar in ERRORS.items():
        if r := cells.get((codec, 'normal')):
            passed = _passed(round(r['nmse'], 3) <= bar)
            yield f'* {passed}: `{codec}` on normal data {r["nmse"]:.4f}, target {bar}'


def draw(rows: Sequence[Line], path: Path) -> None:
    """Draws distortion of fair bits against rate, its ratio to the bound, and codecs' errors."""
    with style.style():
        figure = style.figure(15, 4.8)
        left, middle, right = figure.subplots(1, 3)
        distortions = [r for r in _of(rows, 'distortion') if r['construction'] == 'genie']
        _draw_rates(distortions, [r for r in rows if 'thesis' in r], left)
        _draw_gaps(distortions, middle)
        _draw_codecs(rows, right)
        figure.suptitle(headline(rows))
        style.save(figure, path)


def headline(rows: Sequence[Line]) -> str:
    """The finding: how far the longest code is from the Shannon bound, by search."""
    distortions = [r for r in _of(rows, 'distortion') if r['construction'] == 'genie']
    longest = [r for r in distortions if r['size'] == max(f['size'] for f in distortions)]
    over: dict[str, float] = {}
    for search in dict.fromkeys(r['search'] for r in longest):
        ratios = [r['mean'] / r['bound'] for r in longest if r['search'] == search]
        over[search] = 100 * (float(np.mean(ratios)) - 1)
    if not over:
        return 'No distortion of fair bits was measured'
    best, worst = min(over, key=lambda s: over[s]), max(over, key=lambda s: over[s])
    return (
        f'Polar codes of N = {longest[0]["size"]} are {over[best]:.0f} % above the Shannon bound '
        f'with {best}, {over[worst]:.0f} % with {worst} (means over rates)'
    )


def _draw_rates(rows: Sequence[Line], thesis: Sequence[Line], axes: Axes) -> None:
    d = np.linspace(1e-4, 0.5, 500)
    axes.plot(1 + d * np.log2(d) + (1 - d) * np.log2(1 - d), d, 'k', label='Shannon bound')
    for search, mark in (('randomised', 's'), ('argmax', 'o'), ('scl(8)', '^')):
        some = [r for r in rows if (r['size'], r['search']) == (1024, search)]
        points = [r['rate'] for r in some], [r['mean'] for r in some]
        axes.plot(*points, mark, ms=5, label=f'{search}, N = 1024')
    theirs = [r for r in thesis if r['size'] == 1024]
    points = [r['rate'] for r in theirs], [r['thesis'] for r in theirs]
    axes.plot(*points, 'kx', label='the thesis, N = 1024, 3 blocks')
    axes.set(
        xlabel='message bits per source bit',
        ylabel='share of wrong bits',
        title='distortion of fair bits',
    )
    axes.legend(fontsize=8)


def _draw_gaps(rows: Sequence[Line], axes: Axes) -> None:
    sizes = sorted({r['size'] for r in rows})
    for size in sizes:
        for search, dashes in (('randomised', ':'), ('argmax', '--'), ('scl(8)', '-')):
            some = [r for r in rows if (r['size'], r['search']) == (size, search)]
            over = [r['mean'] / r['bound'] for r in some]
            label = f'N = {size}' if search == 'scl(8)' else None
            colour = style.PALETTE[1 + sizes.index(size)]
            kind = {'marker': '.', 'color': colour, 'label': label}
            axes.plot([r['rate'] for r in some], over, dashes, **kind)
    axes.axhline(1, color='k')
    axes.set(xlabel='message bits per source bit', title='distortion over the Shannon bound')
    axes.set(ylabel='dotted: randomised, dashed: argmax, solid: list of 8')
    axes.legend(fontsize=8)


def _draw_codecs(rows: Sequence[Line], axes: Axes) -> None:
    bits = np.geomspace(0.05, 16, 200)
    axes.plot(bits, 2.0 ** (-2 * bits), 'k', label='Shannon bound, normal')
    scalars = {r['bits']: r['nmse'] for r in _of(rows, 'scalars')}
    if scalars:
        line = list(scalars), list(scalars.values())
        axes.plot(*line, 'k:', label='entropy-coded scalars, normal')
    codecs = _of(rows, 'codec')
    for vector, mark in (('normal', 'o'), ('Laplacian', 's'), ('gradient', '^')):
        for part, colour in (('polar', style.PALETTE[2]), ('', style.PALETTE[1])):
            some = [
                r for r in codecs if r['vector'] == vector and ('polar' in r['codec']) == bool(part)
            ]
            points = [r['bits'] for r in some], [r['nmse'] for r in some]
            label = f'{vector}, {"with polar" if part else "others"}'
            axes.plot(*points, mark, ms=4, alpha=0.7, color=colour, label=label)
    axes.set(xscale='log', yscale='log', xlim=(0.08, 20), ylim=(1e-3, 1.2))
    axes.set(
        xlabel='bits per element', ylabel='|x - C(x)|² / |x|²', title='error of gradient codecs'
    )
    axes.legend(fontsize=7)


def write(paths: Sequence[Path], out: Path) -> tuple[str, int]:
    """Writes table ``out.md`` and picture ``out.png``, ``out.svg`` of the rows in ``paths``.

    Returns:
      The table, and the number of targets that were missed.

    Raises:
      ValueError: if a file has no rows of the benches, as in `load`.
    """
    rows = load(paths)
    text = '\n'.join(markdown(rows)) + '\n'
    out.with_suffix('.md').write_text(text)
    draw(rows, out.with_suffix('.png'))
    missed = sum(verdict(r) is False for r in _of(rows, 'distortion'))
    return text, missed + text.count('* FAIL')


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; exits with 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog='python -m study polar')
    parser.add_argument('rows', type=Path, nargs='+', help='files that the benches wrote, *.jsonl')
    parser.add_argument('--out', type=Path, required=True, help='the report without its suffix')
    args = parser.parse_args(argv)
    try:
        text, missed = write(args.rows, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f'study polar: {error}')
    print(text)
    sys.exit(1 if missed else 0)
