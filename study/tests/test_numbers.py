"""Every number of a page has a source (numbers.txt), and no page is long."""

import re
from math import inf

import pytest

from study.tests import numbers
from tests.base import ROOT

NUMBER = r'\d+(?:,\d{3})*(?:\.\d+)?|\.\d+'


UNREAD = (  # the report's tables, which test_report.py makes again; comments; blocks; addresses
    r'<!-- (results|verdicts|nats|claims|bits|codecs|late|schedules)\b[^>]*-->.*?<!-- /\1 -->',
    r'<!-- (depth|texts|law|chosen|fitted) -->.*?<!-- /\1 -->',
    r'<!--.*?-->',
    r'```.*?```',
    r'\$\$.*?\$\$|\$[^$]*\$',
    r'(?<=\])\([^)]*\)',
)


NAMES = (  # numbers that belong to a name; code
    r'`[^`]*`',
    r'SmolLM2(-135M)?|Qwen[23]|Gemma [23]( 270M)?|NVFP4|LLM\.int8|all-MiniLM-L6-v2|int8',
    r'ResNet-18|GPT-2|CIFAR-10|cifar10_small|WikiText-2( v1)?|EF21|1F1B|float32|fp16',
    r'Apache-2\.0|CC BY 4\.0',
    r'\b0\.1\d\.\d\b|Python 3\.1\d\b(?! or newer)|CUDA 13|H100',
    r'Tables? \d(-\d)?|Top\d+ %|fw\d-bw\d|(\d to )?\d-bit|largest 10 %|\d+ [GM]bit/s|\d+ cores',
    r'arXiv 2401\.07788|\(2106\.05203\)|\(2206\.01299\)',
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
    text = (ROOT / 'study' / 'tests' / 'numbers.txt').read_text()
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


@pytest.mark.parametrize(
    'page',
    [
        'README.md',
        'docs/install.md',
        'docs/results.md',
        'docs/findings.md',
        'docs/paper.md',
        'docs/speed.md',
        'docs/finetune.md',
        'docs/late.md',
        'docs/depth.md',
    ],
)
def test_every_number_of_a_page_has_a_source(page):
    assert faults(read(page), entries(page)) == []


def test_every_number_of_the_advice_has_a_source():
    """test_bench.py has the numbers of the planner, whose parts stand in between."""
    page = 'docs/choosing.md'
    advice, planner, exchanges = re.split(r'(?=## Does a further|## Gradients bet)', read(page))
    assert 'jaxmp plan' in planner
    assert faults(advice + exchanges, entries(page)) == []


def test_a_number_without_a_source_or_of_another_value_is_found():
    entries = [('takes {} ms', '1234.56')]
    assert faults('ResNet-18 takes 1,235 ms.', entries) == []
    assert faults('ResNet-18 takes 1,236 ms.', entries) == ['1,236 should be 1,235: takes {} ms']
    assert faults('It takes 1,235 ms, or 7.', entries) == ['no source: It takes 1,235 ms, or 7']
    assert faults('It takes a second.', entries) == ['0 times, 1 values: takes {} ms']


LOGS = 'LOG.md', 'changelog.md'  # grow with each change


def test_no_page_is_long():
    """In words, tables and code counted; a page that grows loses a paragraph or is split."""
    words = {p.name: len(p.read_text().split()) for p in (ROOT / 'docs').glob('*.md')}
    assert len((ROOT / 'README.md').read_text().split()) <= 600
    assert words['findings.md'] <= 1500
    assert len(read('docs/late.md').split()) <= 700  # beside its tables
    assert len(read('docs/depth.md').split()) <= 900  # beside its tables
    most = {'paper.md': 3000, 'depth.md': inf} | dict.fromkeys(LOGS, inf)
    assert {n: w for n, w in words.items() if w > most.get(n, 1800)} == {}


def test_the_paper_lists_what_it_cites():
    """By arXiv number; two that nobody has read in full are linked and not listed."""
    text, references = (ROOT / 'docs' / 'paper.md').read_text().split('## References')
    listed = re.findall(r'arXiv:(\d+\.\d+)', references)
    cited = set(re.findall(r'arxiv\.org/abs/(\d+\.\d+)', text))
    assert len(listed) == len(set(listed))
    assert cited - set(listed) == {'2010.05625', '2606.05484'}
    assert set(listed) <= cited
