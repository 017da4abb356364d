"""Pages of a report: Markdown from templates, and one HTML page with everything inside."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template

from jaxmp.config import KEYS, Summary
from study.report import figures, glance, late, lost
from study.report.claims import OPEN, OTHER_MARGINS, RATIO, Evidence, Verdict, judge, telling
from study.report.paper import PAPER, REGISTERED
from study.report.residuals import CONFIDENCE, MOST, POWER, Estimate
from study.report.results import Study, settings_of
from study.report.tables import (
    CHANNELS,
    HEADS,
    NONE,
    filled,
    lines,
    markdown,
    notes,
    others,
    plain,
    tokens,
    with_heads,
)

HERE = Path(__file__).parent
TITLE = "The paper's tables and figures, run again"
BARS = (
    'A bar is a loss that a codec of so many bits should not exceed. The first table has the row '
    'of the least loss within the bits of each bar.'
)
CODECS = 'Codecs of the first table'  # of docs/results.md


def template(file: str, **words: object) -> str:
    """A template of this folder with its variables replaced."""
    return Template((HERE / file).read_text()).substitute(words)


def setting(study: Study) -> str:
    """The settings that all runs of a study share, their seeds, commits and hardware."""
    runs = [r for row in study.rows.values() for r in row.runs]
    parts = []
    for measure in ('accuracy', 'perplexity'):
        of_measure = [r for r in runs if r.get('measure', 'accuracy') == measure]
        if of_measure:
            parts.append(common(of_measure))
    same = lambda key: ', '.join(map(str, sorted({r[key] for r in runs})))
    named = lambda name, count: name + 's' * (count > 1)
    hours = sum(r['seconds'] for r in runs) / 3600
    seeds = len({r['seed'] for r in runs})
    parts.append(
        f'{len(runs)} {named("run", len(runs))}; {named("seed", seeds)} {same("seed")}; '
        f'commit {same("commit")}; {same("hardware")}; '
        f'{plain(hours)} hours of wall time (compilation counts in the first seed of a row).'
    )
    return '\n\n'.join(parts)


def common(runs: list[Summary]) -> str:
    """The settings that ``runs`` share, their steps, and the settings that vary between rows."""
    configs = [settings_of(r) for r in runs]
    shown = lambda k: k in SAID or any(c[k] != KEYS[k].default for c in configs)
    keys = [k for k in KEYS if k in configs[0] and k not in UNSAID and shown(k)]
    shared = [k for k in keys if all(c[k] == configs[0][k] for c in configs)]
    own = dict.fromkeys(k for c in configs for k in c if k not in KEYS)
    differ = [*(k for k in keys if k not in shared), *own]
    steps = ', '.join(sorted({f'{r["steps"]:,}' for r in runs}))
    values = ', '.join([f'{k} {configs[0][k]}' for k in shared])
    rows = f' By row: {", ".join(differ)}.' if differ else ''
    return f'{steps} steps per run; {values}.{rows}'


SAID = ('data.name', 'model.name', 'model.width')  # shown even if default
UNSAID = ('name', 'fwd', 'bwd', 'seed', 'parallel.runtime')


def verdicts(judged: list[Verdict]) -> str:
    """The claims as a table with one line per quantity."""
    heads = ['claim', 'verdict', 'quantity and claimed side', 'is', 'by margin', 'paper', 'ours']
    heads += [
        'in points',
        'p (Holm)',
        f'detectable at {100 * POWER:g} % power',
        'seeds',
        'would take',
        'df',
    ]
    rows = []
    for v in judged:
        for i, e in enumerate(v.evidence):
            first = [f'{v.claim} ({v.where})', f'**{v.verdict}**'] if i == 0 else ['', '']
            rows.append([*first, *weighed(e)])
    return markdown(
        *filled(heads, rows), words=4 + any(e.margins for v in judged for e in v.evidence)
    )


def said(verdict: Verdict) -> str:
    """A verdict with the quantity on which it rests, its claimed side, and our value."""
    e = telling(verdict)
    value = f'is {with_unit(e, e.ours)}' if e.ours else e.verdict
    return f'**{verdict.verdict}**<br>{e.text}; {value}'


def number(e: Evidence, value: float) -> str:
    """A value of a quantity: a ratio in percent, others as they are."""
    if math.isnan(value):
        return NONE
    return f'{100 * math.expm1(value):+,.1f} %' if e.unit == RATIO else f'{value:+.2f}'


def with_unit(e: Evidence, ours: Estimate) -> str:
    """Our value of a quantity with its interval and its unit."""
    has_error = not math.isnan(ours.error)
    between = f' [{number(e, ours.low)}, {number(e, ours.high)}]' * has_error
    return f'{number(e, ours.mean)}{between}' + f' {e.unit}' * (e.unit != RATIO)


def weighed(e: Evidence) -> list[str]:
    """The cells of a quantity."""
    cells = [e.text, e.verdict, e.margins or NONE, number(e, e.paper)]
    if e.ours is None:
        return [*cells, *[NONE] * 7]
    ours, has_error = e.ours, not math.isnan(e.ours.error)
    points = f'{e.points:+.2f}' if e.unit == RATIO else NONE
    p = NONE if not has_error else f'{e.p:.3f}' if e.p >= TINY else f'< {TINY}'
    freedom = str(ours.freedom) if has_error else NONE
    cells += [with_unit(e, ours), points, p, number(e, e.detectable)]
    take = f'{MOST} or more' if e.enough == MOST else str(e.enough or NONE)
    return [*cells, str(ours.seeds), take if e.verdict == 'undecided' else NONE, freedom]


TINY = 0.001


def section(study: Study, out: Path) -> str:
    """The section of a study in the report; its figures are drawn into ``out``."""
    delays = late.rows(study)  # such rows differ by these, and hardly by their bits
    pictures = {} if delays else figures.draw(study, out)
    show = lambda title: picture(title, pictures[title]) if title in pictures else ''
    parts = []
    for table in PAPER['tables']:
        if table_lines := lines(table, study):
            body = markdown(*filled(HEADS[table['measure']], table_lines)) + tokens(table, study)
            parts += [f'### {table["title"]}\n', body, '', f'{show(table["figure"])}']
    for measure, heads in HEADS.items():
        if rest := others(study, measure):
            title = f'### Rows that are not in the paper: {measure}\n'
            of_measure = (r for r in study.rows.values() if r.measure == measure)
            columns, lined = filled(with_heads(heads), rest)
            words = 1 + len({*columns} & {*CHANNELS})
            parts += [title, markdown(columns, lined, words) + notes(of_measure), '']
    if delays:
        shown = picture(late.TITLE, late.draw(study, out))
        parts += [f'### {late.TITLE}\n', shown, late.table([study]), '']
    for title in pictures:
        if 'against' in title:
            parts += [f'### {title}\n', show(title)]
    return template(
        'study.md', name=study.name, setting=setting(study), claims=claims(study),
        tables='\n'.join(parts),
    )  # fmt: skip


def picture(title: str, file: str) -> str:
    """A picture that leads to itself at its own size."""
    return f'[![{title}]({file})]({file.replace("png", "svg")})\n'


def claims(study: Study) -> str:
    """The verdicts on the paper's claims, and on the registered ones if the first was run."""
    tested = lambda judged: [v for v in judged if any(e.ours for e in v.evidence)]
    paper, registered = judge(study), judge(study, REGISTERED['claims'])
    parts = []
    if tested(paper):
        title = "### Verdicts on the paper's claims at this scale"
        parts += [f'{title}\n\n{verdicts(paper)}\n\n']
    if tested(registered[:1]):
        table = verdicts(tested(registered))
        parts += [f'### {REGISTERED["title"]}\n\n{REGISTERED["rule"]}\n\n{table}\n\n']
    return '\n'.join(parts)


def nats(table: lost.Table, out: Path) -> str:
    """The section of a table of nats lost; its pictures are drawn into ``out``."""
    drawn = picture(lost.TITLE, lost.draw(table, out))
    if file := glance.draw(table, out):
        drawn = f'{picture(glance.TITLE, file)}\n{drawn}'
    bars = f'{BARS}\n\n{judged}\n\n' if (judged := lost.bars(table)) else ''
    return template(
        'nats.md', name=table.name, picture=drawn, bars=bars, rows=lost.whole(table),
        setting=lost.setting(table),
    )  # fmt: skip


def write(
    studies: list[Study],
    folder: str,
    out: Path,
    tables: Sequence[lost.Table] = (),
    codecs: str = '',
) -> None:
    """Writes report.md, report.html and the pictures.

    Args:
      studies: of trainings.
      folder: the name of the folder that they were read from.
      out: where the report is written.
      tables: of nats lost.
      codecs: the table of the codecs of the answers' rows; '' if there is none of them.
    """
    out.mkdir(parents=True, exist_ok=True)
    parts = [f'## {CODECS}\n\n{codecs}\n'] if codecs else []
    parts += [
        f'## {p.title}\n\n{picture(p.title, figures.put(p, out))}' for p in figures.across(studies)
    ]
    margin = PAPER['margin']
    text = template(
        'template.md', title=TITLE, source=PAPER['source'], folder=folder,
        confidence=f'{100 * CONFIDENCE:g}', power=f'{100 * POWER:g}', why=margin['why'],
        margin=f'{100 * margin["errors"]:g}',
        allowed=' to '.join(f'{100 * m:g} %' for m in margin['allowed']),
        others=f'{100 * OTHER_MARGINS[0]:g} to {100 * OTHER_MARGINS[-1]:g} %',
        studies='\n'.join(
            [*parts, *(nats(t, out) for t in tables), *(section(s, out) for s in studies)]
        ),
    )  # fmt: skip
    (out / 'report.md').write_text(text)
    (out / 'report.html').write_text(html(text, out))


def html(text: str, folder: Path) -> str:
    """``text`` as an HTML page that includes its style and the pictures of ``folder``."""
    from markdown_it import MarkdownIt

    body = MarkdownIt().enable('table').render(text)
    for word in ('supported', 'contradicted', 'undecided', OPEN):
        kind = word.partition(' ')[0]
        body = body.replace(f'<strong>{word}</strong>', f'<strong class="{kind}">{word}</strong>')
    body = body.replace('<table>', '<div class="wide"><table>')
    body = body.replace('</table>', '</table></div>')
    body = re.sub(r'<a href="[^"]+\.svg">(.*?)</a>', r'\1', body)
    body = re.sub(r'src="([^"]+\.png)"', lambda m: f'src="{inline(folder / m[1])}"', body)
    studies = re.findall('<h2>(.*?)</h2>', body)
    for i, title in enumerate(studies):
        body = body.replace(f'<h2>{title}</h2>', f'<h2 id="part-{i}">{title}</h2>', 1)
    links = ''.join(f'<li><a href="#part-{i}">{title}</a>' for i, title in enumerate(studies))
    body = body.replace('</h1>', f'</h1>\n<ul>{links}</ul>', 1)
    style = (HERE / 'style.css').read_text()
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{TITLE}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<style>\n{style}</style>\n<main>\n{body}</main></html>\n'
    )


def inline(path: Path) -> str:
    """A picture as a data URL."""
    return 'data:image/png;base64,' + base64.b64encode(path.read_bytes()).decode()
