"""Every number of the README and of the findings comes from a committed file (numbers.txt)."""

import re

import pytest

from tests import numbers
from tests.runs import ROOT

NUMBER = r'\d+(?:,\d{3})*(?:\.\d+)?|\.\d+'
UNREAD = (  # the report's tables, which test_report.py makes again; comments; blocks; addresses
    r'<!-- (results|verdicts) \S+ -->.*?<!-- /\1 -->',
    r'<!--.*?-->',
    r'```.*?```',
    r'(?<=\])\([^)]*\)',
)
NAMES = (  # numbers that belong to a name; code
    r'`[^`]*`',
    r'ResNet-18|GPT-2|CIFAR-10|cifar10_small|WikiText-2 v1|EF21|1F1B|float32|fp16',
    r'Apache-2\.0|CC BY 4\.0',
    r'Tables? \d(-\d)?|Top\d+ %|fw\d-bw\d|(\d to )?\d-bit|largest 10 %|\d+ [GM]bit/s|\d+ cores',
    r'\(arXiv 2401\.07788\)|\(2106\.05203\)|\(2206\.01299\)',
    r'\(1905\.13727\)|\(1905\.05957\)|\(0903\.0307\)',
    r'none < 50 < 30 < 20 < 10 <',
)


def read(path):
    """A page in one line, without what is not prose."""
    text = (ROOT / path).read_text()
    for pattern in UNREAD:
        text = re.sub(pattern, '', text, flags=re.DOTALL)
    return re.sub(r'\s+', ' ', text)


def entries(page):
    """Pieces of a page and the expressions of their numbers."""
    text = (ROOT / 'tests' / 'numbers.txt').read_text()
    [part] = [p for p in re.split(r'^== ', text, flags=re.MULTILINE) if p.startswith(page + '\n')]
    return re.findall(r'^(\S.*)\n +(.*)$', part, re.MULTILINE)


def written(value, like):
    """``value`` in the form of the number ``like``."""
    if isinstance(value, str):
        return value
    digits = len(like.partition('.')[2])
    text = f'{value:{"," if "," in like else ""}.{digits}f}'
    return text.removeprefix('0') if like.startswith('.') else text


def faults(text, entries):
    """What is wrong with the numbers of a page, a line each."""
    known, wrong = [False] * len(text), []
    for match in re.finditer('|'.join(NAMES), text):
        known[match.start() : match.end()] = [True] * len(match[0])
    for words, expression in entries:
        values = eval(f'[{expression}]', vars(numbers))
        places = re.escape(words).replace(r'\{\}', rf'({NUMBER}|\b[0-9a-f]{{7}}\b)')
        matches = list(re.finditer(places, text))
        if len(matches) != 1 or len(matches[0].groups()) != len(values):
            wrong.append(f'{len(matches)} times, {len(values)} values: {words}')
            continue
        for i, value in enumerate(values, 1):
            start, end = matches[0].span(i)
            known[start:end] = [True] * (end - start)
            if (is_ := matches[0][i]) != (be := written(value, is_)):
                wrong.append(f'{is_} should be {be}: {words}')
    loose = [m for m in re.finditer(NUMBER, text) if not all(known[m.start() : m.end()])]
    return [*wrong, *(f'no source: {text[max(0, m.start() - 40) : m.end()]}' for m in loose)]


@pytest.mark.parametrize('page', ['README.md', 'docs/findings.md'])
def test_every_number_of_a_page_has_a_source(page):
    assert faults(read(page), entries(page)) == []


def test_a_number_without_a_source_or_of_another_value_is_found():
    entries = [('takes {} ms', '1234.56')]
    assert faults('ResNet-18 takes 1,235 ms.', entries) == []
    assert faults('ResNet-18 takes 1,236 ms.', entries) == ['1,236 should be 1,235: takes {} ms']
    assert faults('It takes 1,235 ms, or 7.', entries) == ['no source: It takes 1,235 ms, or 7']
    assert faults('It takes a second.', entries) == ['0 times, 1 values: takes {} ms']


def test_every_row_of_a_table_stands_in_one():
    """Two rows and a rule at least: a row by itself is shown as text."""
    pages = [ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')]
    for path in pages:
        text = re.sub(r'```.*?```', '', path.read_text(), flags=re.DOTALL)
        for block in re.findall(r'(?:^\|.*\n?)+', text, re.MULTILINE):
            assert re.match(r'\|.*\n\|[-:|]+\|\n\|', block), f'{path.name}: {block[:80]}'


def test_what_is_built_is_no_part_of_the_repository():
    assert {'site/', 'build/', 'runs/'} <= {*(ROOT / '.gitignore').read_text().split()}
