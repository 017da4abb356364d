"""The report: Markdown from two templates, and one HTML page that needs no other file."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from string import Template
from typing import Any

from jaxmp.report import figures
from jaxmp.report.claims import PAPER, Evidence, Verdict, judge
from jaxmp.report.results import CONFIDENCE, Study
from jaxmp.report.tables import HEADS, lines, markdown, others, plain, with_interval

HERE = Path(__file__).parent
TITLE = "The paper's tables and figures, run again"


def template(file: str, **words: Any) -> str:
    """A template of this folder, filled in."""
    return Template((HERE / file).read_text()).substitute(words)


def setting(study: Study) -> str:
    """Where the numbers are from: what all runs share, commits, hardware, seeds."""
    runs = [r for row in study.rows.values() for r in row.runs]
    said = []
    for measure in ('accuracy', 'perplexity'):
        own = [r for r in runs if r.get('measure', 'accuracy') == measure]
        if own:
            keys = [k for k in own[0]['config'] if k not in UNSAID]
            said.append(', '.join(f'{k} {own[0]["config"][k]}' for k in keys) + '.')
    same = lambda key: ', '.join(sorted({str(r[key]) for r in runs}))
    hours = sum(r['seconds'] for r in runs) / 3600
    said.append(
        f'{len(runs)} runs; seeds {same("seed")}; commit {same("commit")}; {same("hardware")}; '
        f'{plain(hours)} hours of wall time, the compilations of a row in its first seed.'
    )
    return '\n\n'.join(said)


UNSAID = (
    'name', 'fwd', 'bwd', 'seed', 'warmup_epochs', 'download', 'tensorboard', 'checkpoint_every',
    'init_from', 'tokenizer', 'runtime', 'micro_batches', 'remat',
)  # fmt: skip


def verdicts(found: list[Verdict]) -> str:
    """The claims as a table, a line a quantity."""
    if not any(e.ours for v in found for e in v.evidence):
        return 'No row was run that a claim needs.'
    heads = ['claim', 'verdict', 'quantity: where it is claimed to lie', 'is', 'paper', 'ours']
    rows = []
    for v in found:
        for i, e in enumerate(v.evidence):
            first = [f'{v.claim} ({v.where})', f'**{v.verdict}**'] if i == 0 else ['', '']
            rows.append([*first, *weighed(e)])
    return markdown(heads, rows, words=4)


def weighed(e: Evidence) -> list[str]:
    """A quantity's cells."""
    return [e.text, e.verdict, f'{e.paper:+.2f}', with_interval(e.ours)]


def section(study: Study, out: Path) -> str:
    """A study's part of the report; draws its figures into ``out``."""
    pictures = figures.draw(study, out)
    show = lambda title: f'![{title}]({pictures[title]})\n' if title in pictures else ''
    parts = []
    for table in PAPER['tables']:
        if any(r['row'] in study.rows for r in table['rows']):
            body = markdown(HEADS[table['measure']], lines(table, study))
            parts += [f'### {table["title"]}\n', body, '', f'{show(table["figure"])}']
    for measure, heads in HEADS.items():
        if rest := others(study, measure):
            parts += [f'### Rows that the paper has not: {measure}\n', markdown(heads, rest), '']
    for title in pictures:
        if 'against' in title:
            parts += [f'### {title}\n', show(title)]
    return template(
        'study.md', name=study.name, setting=setting(study), confidence=f'{100 * CONFIDENCE:g}',
        margin=f'{PAPER["margin"]["points"]:g}', why=PAPER['margin']['why'],
        verdicts=verdicts([judge(c, study) for c in PAPER['claims']]), tables='\n'.join(parts),
    )  # fmt: skip


def write(studies: list[Study], folder: str, out: Path) -> None:
    """Writes report.md, report.html and the pictures."""
    out.mkdir(parents=True, exist_ok=True)
    text = template(
        'template.md', title=TITLE, source=PAPER['source'], folder=folder,
        confidence=f'{100 * CONFIDENCE:g}', studies='\n'.join(section(s, out) for s in studies),
    )  # fmt: skip
    (out / 'report.md').write_text(text)
    (out / 'report.html').write_text(html(text, out))


def html(text: str, folder: Path) -> str:
    """``text`` as a page with its style and the pictures of ``folder`` inside."""
    from markdown_it import MarkdownIt

    body = MarkdownIt().enable('table').render(text)
    for word in ('supported', 'contradicted', 'undecided'):
        body = body.replace(f'<strong>{word}</strong>', f'<strong class="{word}">{word}</strong>')
    body = body.replace('<table>', '<div class="wide"><table>')
    body = body.replace('</table>', '</table></div>')
    body = re.sub(r'src="([^"]+\.png)"', lambda m: f'src="{inline(folder / m[1])}"', body)
    style = (HERE / 'style.css').read_text()
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{TITLE}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<style>\n{style}</style>\n<main>\n{body}</main></html>\n'
    )


def inline(path: Path) -> str:
    """A picture as a data address."""
    return 'data:image/png;base64,' + base64.b64encode(path.read_bytes()).decode()
