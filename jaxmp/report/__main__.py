"""`python -m jaxmp.report FOLDER --out DIR [--into PAGE ...]`: what finished runs say.

Writes DIR/report.md, report.html (one file, pictures inside), the pictures, and a CSV for each
study with every run, beside the paper's numbers. Nothing but the result files is read.

`python -m jaxmp.report polar ROWS.jsonl ... --out NAME`: NAME.md and NAME.png of what the benches
of the polar codes and of the gradient codecs wrote.
"""

import argparse
import re
import sys
from pathlib import Path

from jaxmp.report import page, polar
from jaxmp.report.claims import judge
from jaxmp.report.results import Study, last, load
from jaxmp.report.tables import HEADS, cells, markdown, write_csv

MARKS = re.compile(
    r'(<!-- (?P<what>results|verdicts) (?P<study>\S+) -->\n).*?(<!-- /(?P=what) -->)', re.DOTALL
)


def overview(study: Study) -> str:
    """All rows of a study in one table, and where they are from."""
    rows = sorted(study.rows.values(), key=lambda r: -last(r, r.judged).mean)
    own = [r for r in rows if r.measure == rows[0].measure]
    table = [cells(r.name, {}, r, study.rows.get('none')) for r in own]
    keep = [i for i, h in enumerate(HEADS[own[0].measure]) if not h.startswith('paper')]
    picked = [[line[i] for i in keep] for line in (list(HEADS[own[0].measure]), *table)]
    sent = [['forward', 'backward'], *([f'`{r.runs[0][k]}`' for k in ('fwd', 'bwd')] for r in own)]
    whole = [[line[0], *s, *line[1:]] for line, s in zip(picked, sent, strict=True)]
    return markdown(whole[0], whole[1:], words=3) + f'\n\n{page.setting(study)}\n'


def findings(study: Study) -> str:
    """The paper's claims and what became of each."""
    rows = [[f'{v.claim} ({v.where})', v.verdict] for v in judge(study)]
    return markdown(['claim', 'verdict'], rows, words=2) + '\n'


def renew(text: str, studies: list[Study]) -> str:
    """``text`` with the tables of each study between their marks.

    Raises:
      ValueError: if a mark names no study.
    """
    known, make = {s.name: s for s in studies}, {'results': overview, 'verdicts': findings}
    if unknown := [m['study'] for m in MARKS.finditer(text) if m['study'] not in known]:
        raise ValueError(f'no study {unknown[0]!r}; there are {", ".join(known)}')
    return MARKS.sub(lambda m: m[1] + make[m['what']](known[m['study']]) + m[4], text)


def main(argv: list[str] | None = None) -> None:
    """Reads finished runs, writes the report."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ['polar']:
        return _polar(words[1:])
    parser = argparse.ArgumentParser(
        prog='python -m jaxmp.report',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('folder', type=Path, help='results: of a study, or of several in folders')
    parser.add_argument('--out', type=Path, required=True, help='where the report goes')
    parser.add_argument(
        '--into', type=Path, nargs='+', default=[],
        help='pages whose <!-- results STUDY --> and <!-- verdicts STUDY --> are renewed',
    )  # fmt: skip
    args = parser.parse_args(words)
    try:
        studies = load(args.folder)
        page.write(studies, args.folder.name, args.out)
        for study in studies:
            write_csv(args.out / f'{study.name}.csv', study)
        for into in args.into:
            into.write_text(renew(into.read_text(), studies))
    except (OSError, ValueError) as error:
        sys.exit(f'jaxmp.report: {error}')
    print(f'{sum(len(s.rows) for s in studies)} rows; {args.out / "report.html"}')


def _polar(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog='python -m jaxmp.report polar')
    parser.add_argument('rows', type=Path, nargs='+', help='what the benches wrote, *.jsonl')
    parser.add_argument('--out', type=Path, required=True, help='the report without its ending')
    args = parser.parse_args(words)
    try:
        text, missed = polar.write(args.rows, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f'jaxmp.report: {error}')
    print(text)
    sys.exit(1 if missed else 0)


if __name__ == '__main__':
    main()
