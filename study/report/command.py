"""`python -m study report FOLDER --out DIR [--into PAGE ...]`: a report of finished runs.

The command reads only the result files in FOLDER. It writes DIR/report.md, DIR/report.html (one
file with the pictures inside), the pictures as PNG and as SVG, and a CSV of all runs per study. The
tables have the paper's numbers beside ours. Rows of `python -m study nats` are a table and a
picture of nats lost by codec.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.report import answers, late, lost, page
from study.report.claims import judge
from study.report.results import Study, last, load
from study.report.tables import (
    HEADS,
    cells,
    markdown,
    marked,
    notes,
    with_channels,
    with_heads,
    write_csv,
)

MARKS = re.compile(
    r'(<!-- (?P<what>results|verdicts|nats|claims|bits|late)(?: (?P<study>\S+))? -->\n)'
    r'.*?(<!-- /(?P=what) -->)',
    re.DOTALL,
)


def overview(study: Study) -> str:
    """A table of all rows of a study, and the settings of their runs."""
    rows = sorted(study.rows.values(), key=lambda r: -last(r, r.judged).mean)
    shown = [r for r in rows if r.measure == rows[0].measure]
    none = study.rows.get('none')
    table = [with_channels(cells(marked(r), {}, r, none), r) for r in shown]
    heads = with_heads(HEADS[shown[0].measure])
    keep = [i for i, h in enumerate(heads) if not h.startswith('paper')]
    picked = [[line[i] for i in keep] for line in (heads, *table)]
    return markdown(picked[0], picked[1:], words=3) + f'{notes(shown)}\n\n{page.setting(study)}\n'


def findings(*studies: Study) -> str:
    """A table of the paper's claims with a verdict on each, and what it rests on, in each study."""
    judged = [judge(study) for study in studies]
    rows = [[f'{v[0].claim} ({v[0].where})', *map(page.said, v)] for v in zip(*judged, strict=True)]
    heads = [s.name for s in studies] if len(studies) > 1 else ['verdict']
    return markdown(['claim', *heads], rows, words=1 + len(heads)) + '\n'


def nats(table: lost.Table) -> str:
    """The bars of a table of nats lost, and its settings."""
    return f'{lost.bars(table)}\n\n{lost.setting(table)}\n'


def renew(text: str, studies: list[Study], tables: Sequence[lost.Table] = ()) -> str:
    """``text`` with the tables of each study written between their marks.

    Raises:
      ValueError: if a mark has the name of an unknown study.
    """
    by_name: dict[str, Any] = {s.name: s for s in (*studies, *tables)}
    make = {'results': overview, 'verdicts': findings, 'nats': nats, 'claims': answers.nine}
    # Of all studies that there are.
    whole = {'bits': answers.by_bits, 'late': late.page}
    named = lambda m: [] if m['what'] in whole else (m['study'] or '').split(',')
    if unknown := [n for m in MARKS.finditer(text) for n in named(m) if n not in by_name]:
        raise ValueError(f'no study {unknown[0]!r}; allowed are {", ".join(by_name)}')

    def written(m: re.Match[str]) -> str:
        what = m['what']
        content = (
            whole[what](by_name) if what in whole else make[what](*(by_name[n] for n in named(m)))
        )
        return m[1] + content + m[4]

    return MARKS.sub(written, text)


def main(argv: list[str] | None = None) -> None:
    """Runs the command: reads finished runs and writes the report."""
    parser = argparse.ArgumentParser(
        prog='python -m study report',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('folder', type=Path, help='results of a study, or folders of results')
    parser.add_argument('--out', type=Path, required=True, help='folder of the report')
    parser.add_argument(
        '--into', type=Path, nargs='+', default=[],
        help='pages in which to replace <!-- results STUDY -->, <!-- nats STUDY -->, '
        '<!-- verdicts STUDY,STUDY -->, <!-- claims STUDY,STUDY -->, <!-- bits --> '
        'and <!-- late -->',
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        tables = lost.load(args.folder)
        studies = studies_of(args.folder, tables)
        codecs = answers.codecs({s.name: s for s in (*studies, *tables)})
        page.write(studies, args.folder.name, args.out, tables, codecs)
        for study in studies:
            write_csv(args.out / f'{study.name}.csv', study)
        for table in tables:
            lost.write_csv(args.out / f'{table.name}.csv', table)
        for into in args.into:
            into.write_text(renew(into.read_text(), studies, tables))
    except (OSError, ValueError) as error:
        sys.exit(f'python -m study report: {error}')
    count = sum(len(s.rows) for s in (*studies, *tables))
    print(f'{count} rows; {args.out / "report.html"}')


def studies_of(folder: Path, tables: Sequence[lost.Table]) -> list[Study]:
    """The studies of trainings in ``folder``; there may be none beside ``tables``.

    Raises:
      FileNotFoundError: if there are neither.
    """
    try:
        return load(folder)
    except FileNotFoundError:
        if not tables:
            raise
        return []
