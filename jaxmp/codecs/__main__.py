"""`jaxmp codecs [MODULE ...]`: a list of the words of the algebra and of those in your own modules.

The tables of words in docs are generated here: ``--into PAGE`` replaces the part of a page
between ``<!-- words KIND -->`` and ``<!-- /words -->``.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
import textwrap
from pathlib import Path

from jaxmp.grammar import (
    BETWEEN,
    KINDS,
    KNOWN,
    TENSOR,
    Names,
    Word,
    above_shannon,
    imported,
    on_text,
    ours,
    own,
    words_of,
    young,
)

OF = f'Bits are per element of a {TENSOR.shape} float32 tensor.\n'
NONE = 'not measured'
WIDTH = 96


def plain(words: list[Word]) -> str:
    """The words of each kind for a terminal."""
    parts = []
    for kind, rows in by_kind(words).items():
        parts.append(f'{KINDS[kind].title}\n')
        for w in rows:
            cost = f'{NONE} ({w.note})' if w.bits is None else f'{_number(w)} for {w.example}'
            cost += f', by {w.note}' * bool(w.note and w.bits is not None)
            lines = [f'bits: {cost}', w.line.replace('`', ''), *w.sources]
            parts.append('\n'.join([f'  {w.form}', *(f'      {s}' for s in lines if s)]))
        parts.append('')
    return '\n'.join(parts)


def table(words: list[Word], names: Names = KNOWN) -> str:
    """Words of one kind as a Markdown table; ``names`` are those that their examples use."""
    between = any(w.kind in BETWEEN for w in words)
    codecs = any(w.kind == 'codec' for w in words)
    heads = ['word', 'what it is', 'bits per element', *['above Shannon', 'on text'] * codecs]
    lines = [f'| {" | ".join([*heads, *["collectives"] * between, "source"])} |']
    lines.append(f'|---|---|--:|{"--:|--:|" * codecs}{"---|" * (between + 1)}')
    for w in words:
        cost = NONE if w.bits is None else _number(w)
        cost += f', `{w.example}`' * (w.example not in ('', w.form))
        by = [*([_above(w, names), _on_text(w, names)] if codecs else ())]
        by += [w.note] * between
        row = [f'`{w.form}`', _marked(w.line), cost, *by, '; '.join(map(_link, w.sources))]
        lines.append(f'| {" | ".join(row)} |')
    return '\n'.join(lines)


def grammar(words: list[Word]) -> str:
    """The grammar of channel and exchange texts in Markdown, one rule per kind of word."""
    lines = []
    for kind, rows in by_kind(words).items():
        lines.append(f'{kind:8} := {rows[0].form}')
        for w in rows[1:]:
            if len(lines[-1]) + len(w.form) < WIDTH:
                lines[-1] += f' | {w.form}'
            else:
                alone = f'{"":8} | {w.form}'
                lines += textwrap.wrap(alone, 100, subsequent_indent=' ' * (12 + w.form.find('(')))
    return '\n'.join(['```', *lines, '```'])


def by_kind(words: list[Word]) -> dict[str, list[Word]]:
    """The words grouped by kind, without the kinds that have no word."""
    groups = {kind: [w for w in words if w.kind == kind] for kind in KINDS}
    return {kind: rows for kind, rows in groups.items() if rows}


def renew(page: str, words: list[Word]) -> str:
    """``page`` with the table of each kind, or the grammar, written between its marks.

    Raises:
      ValueError: if a mark names no kind.
    """
    parts = {'grammar': grammar(words)} | {k: table(rows) for k, rows in by_kind(words).items()}

    def part(match: re.Match) -> str:
        if match[2] not in parts:
            raise ValueError(f'no words {match[2]!r}; allowed are {", ".join(parts)}')
        return f'{match[1]}\n{parts[match[2]]}\n\n{match[3]}'

    return re.sub(r'(<!-- words (\S+) -->\n).*?(<!-- /words -->)', part, page, flags=re.DOTALL)


def _number(w: Word) -> str:
    return f'{w.bits:.4g}'


def _above(w: Word, names: Names) -> str:
    above = None if w.bits is None else above_shannon(w.example, names)
    return '' if above is None else f'{above:.2f}'


def _on_text(w: Word, names: Names) -> str:
    return '' if w.bits is None else on_text(w.example, names)


def _marked(line: str) -> str:
    """A docstring's sentence as a table cell; ``|`` inside code is escaped, as it ends the cell."""

    def code(match: re.Match) -> str:
        safe = html.escape(match[1]).replace('|', '&#124;')
        return f'<code>{safe}</code>' if '|' in match[1] else f'`{match[1]}`'

    return re.sub(r'``(.+?)``', code, line)


def _link(source: str) -> str:
    return re.sub(r'^(.*), arXiv (\d{4}\.\d{4,5})', r'[\1](https://arxiv.org/abs/\2)', source)


def main(argv: list[str] | None = None) -> None:
    """Runs the command: prints the words, or replaces the tables in pages."""
    parser = argparse.ArgumentParser(
        prog='jaxmp codecs',
        description='List every word of the algebra: its form, its bits, what it does.',
    )
    parser.add_argument('module', nargs='*', help='modules with words of your own: my.codecs')
    parser.add_argument('--markdown', action='store_true', help='print the tables in Markdown')
    parser.add_argument(
        '--into', type=Path, nargs='+', default=[], metavar='PAGE',
        help='pages in which to replace the parts <!-- words KIND --> ... <!-- /words -->',
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        modules = imported(args.module)
        mine = {k: v for m in modules for k, v in own(m).items()}
        known, yours = ours(), words_of(mine, modules)
        contributed = young()
        words = [*known, *contributed, *yours]
        for page in args.into:
            page.write_text(renew(page.read_text(), words))
    except (OSError, ValueError) as error:
        sys.exit(f'jaxmp codecs: {error}')
    if args.markdown:
        names, rows = KNOWN | mine, by_kind(words).items()
        parts = (f'## {KINDS[k].title}\n\n{table(some, names)}\n' for k, some in rows)
        print(OF, *parts, sep='\n')
    elif not args.into:
        print(OF, plain(known), sep='\n')
        print(f'----- jaxmp.contrib -----\n\n{plain(contributed)}')
        if yours:
            print(f'----- {", ".join(args.module)} -----\n\n{plain(yours)}')


if __name__ == '__main__':
    main()
