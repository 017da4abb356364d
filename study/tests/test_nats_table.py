"""A table of nats lost by codec: rows are computed once, paired with none, and shown with bars."""

import json

import numpy as np
import pytest

from jaxmp import parse
from jaxmp.training.evaluation import perplexity
from study import nats as nats_table
from study.report import command as report
from study.report import lost
from tests.test_pretrained import tiny

STUDY = """
from study.nats import Row
KLT = 'klt({}, refresh=2, entropy=True{})'
def get_rows():
    return [
        Row('none', 'raw', cuts=(1,), tokens=128),
        Row('block2', 'block(2)', cuts=(1,), tokens=96),
        Row('two-raw', 'raw', cuts=(1, 2), tokens=64),
        Row('two', 'raw;block(2)', cuts=(1, 2), tokens=64),
        Row('first', KLT.format(2, ', fixed=True'), cuts=(1,), tokens=128),
        Row('klt', KLT.format(2, ', fixed=True'), KLT.format(2, ''), (1,), 128, 256),
        Row(
            'weighed', KLT.format(2, ', fixed=True, by_gradient=0.5'),
            KLT.format(2, ', by_gradient=0.5') + ' | klt(4, refresh=2)', (1,), 128, 256,
        ),
    ]
"""


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A random decoder of three blocks, a text, another to learn from, and a study."""
    folder = tmp_path_factory.mktemp('table')
    tiny(folder / 'model')
    letters = np.random.default_rng(0).integers(97, 123, (2, 256), np.uint8)
    for name, row in zip(('some', 'other'), letters, strict=True):
        (folder / f'{name}.txt').write_bytes(row.tobytes())
    (folder / 'rows.py').write_text(STUDY)
    return folder


def evaluate(place, *words, study='rows.py', out='results'):
    nats_table.main([
        str(place / 'model'), f'--text={place / "some.txt"}', '--tokenizer=bytes', '--block=8',
        f'--study={place / study}', f'--before={place / "other.txt"}', '--batch=2',
        f'--work={place / "work"}', f'--out={place / out}', *words,
    ])  # fmt: skip


@pytest.fixture(scope='module')
def rows(place):
    evaluate(place)
    return {p.stem: json.loads(p.read_text()) for p in (place / 'results').glob('*.json')}


def test_each_row_is_a_file_with_what_it_takes_to_judge_it(rows):
    assert {*rows} == {'none', 'block2', 'two-raw', 'two', 'first', 'klt', 'weighed'}
    row, none = rows['block2'], np.array(rows['none']['nats_by_block'])
    assert (row['blocks'], rows['none']['blocks'], none.size) == (12, 16, 16)
    apart = np.array(row['nats_by_block']) - none[:12]
    assert row['nats_lost'] == pytest.approx(apart.mean(), abs=1e-6)
    assert row['standard_error'] == pytest.approx(apart.std(ddof=1) / 12**0.5, abs=1e-6)
    assert abs(row['nats_lost']) > 1e-5
    told = (
        'python -m study nats model --text=some.txt --study=rows --rows=block2 --block=8 --batch=2'
    )
    assert row['command'].startswith(told)
    assert row['hardware']
    assert row['commit']


def test_rows_are_those_of_the_command_without_a_study(rows, place):
    model = nats_table.opened(str(place / 'model'), 'bytes', (1,))
    blocks = perplexity.blocks_of(model, place / 'some.txt', 8, 96, 2)
    channels = {text: parse(text) for text in ('raw', 'block(2)')}
    found = perplexity.scores(model, blocks, channels, 2)
    np.testing.assert_allclose(rows['block2']['nats_by_block'], found['block(2)'].nats, atol=1e-5)
    assert rows['block2']['bits'] == found['block(2)'].bits


def test_none_is_none_whatever_the_cuts_and_each_boundary_has_its_channel(rows):
    assert abs(rows['two-raw']['nats_lost']) < 1e-6
    assert rows['two']['bits_by_cut'] == [32, rows['block2']['bits']]
    assert rows['two']['bits'] == np.mean(rows['two']['bits_by_cut'])
    assert abs(rows['two']['nats_lost']) > 1e-6


def test_a_rule_learns_before_it_is_tested(rows):
    """The bits of what was learned do not count; a basis that was not learned is another."""
    assert rows['klt']['bits'] == rows['first']['bits']
    assert rows['klt']['nats_by_block'] != rows['first']['nats_by_block']
    assert (rows['klt']['learned_from'], rows['first']['learned_from']) == ('other.txt', '')
    assert '--before=other.txt' in rows['klt']['command']


def test_components_are_learned_from_gradients_too(rows, place):
    """The states are those of training with the same channels: the basis is not orthogonal."""
    assert rows['weighed']['bits'] == rows['klt']['bits']
    assert rows['weighed']['nats_by_block'] != rows['klt']['nats_by_block']
    setting = nats_table.Setting(
        'rows', str(place / 'model'), 'bytes', place / 'some.txt', place / 'other.txt', 8, 2,
        place / 'work',
    )  # fmt: skip
    learn = rows['weighed']['learn']
    [(sender, receiver)] = nats_table.learned((1,), learn, 256, setting).fwd
    book = np.asarray(receiver.book[1:])
    np.testing.assert_array_equal(sender.known.book[1:], book)
    assert np.abs(book @ book.T - np.eye(len(book))).max() > 0.05
    alone = nats_table.learned((1,), rows['klt']['learn'], 256, setting).fwd[0][1].book[1:]
    assert np.abs(alone @ alone.T - np.eye(len(book))).max() < 0.02


def test_a_finished_row_is_not_computed_again(rows, place, monkeypatch, capsys):
    asked = []
    record = nats_table.record
    monkeypatch.setattr(
        nats_table, 'record', lambda row, *rest: asked.append(row.name) or record(row, *rest)
    )
    before = sorted((place / 'work').rglob('*.npy'))
    (place / 'results' / 'two.json').unlink()
    evaluate(place)
    assert asked == ['two']
    assert 'two  ' in (shown := capsys.readouterr().out)
    assert '; 0 to do, about 0:00 left' in shown
    # What stands before the first boundary is kept: 8 batches of the text, 16 of the other.
    assert sorted((place / 'work').rglob('*.npy')) == before
    assert len(before) == 8 + 16


def test_a_row_that_another_process_computes_is_left_to_it(rows, place, capsys):
    (place / 'results' / 'two.json').rename(place / 'two.json')
    with nats_table.locked(place / 'work' / 'rows' / 'two'):
        evaluate(place)
    assert not (place / 'results' / 'two.json').exists()
    (place / 'two.json').rename(place / 'results' / 'two.json')


ROW = "Row('{}', 'raw', cuts=(1,))"
MISTAKES = {
    'no study': ('', [], r'has no get_rows\(\); see configs/pretrained_codecs.py'),
    'no file': ('-', [], r'there is no such Python file: .*nowhere\.py'),
    'another first': (ROW.format('some'), [], "first row of .* is not 'none'"),
    'two of a name': (f'{ROW.format("none")}, {ROW.format("none")}', [], 'has two rows none; give'),
    'no row': (None, ['--rows=some'], "no row 'some'; allowed are none, block2, two-raw"),
    'other settings': (None, ['--batch=4'], r'batch=2 \(now 4\); move it away or give another --o'),
    'none is not there': (None, ['--rows=two', '--out=empty'], 'are compared; run none first'),
}  # fmt: skip


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_told_in_a_line(rows, place, case, tmp_path):
    made, words, message = MISTAKES[case]
    words = [w.replace('=empty', f'={tmp_path}') for w in words]
    study = 'rows.py'
    if made == '-':
        study = 'nowhere.py'
    elif made is not None:
        study, head = 'wrong.py', 'from study.nats import Row\n'
        body = f'def get_rows():\n    return [{made}]\n' if made else ''
        (place / study).write_text(head + body)
    with pytest.raises(SystemExit, match=f'^study nats: .*{message}') as caught:
        evaluate(place, *words, study=study)
    assert '\n' not in str(caught.value)


def test_a_rule_without_a_text_to_learn_from(place):
    model = nats_table.Setting(
        '', str(place / 'model'), 'bytes', place / 'some.txt', None, 8, 2, place / 'work'
    )
    rows = [nats_table.Row('none', 'raw'), nats_table.Row('klt', 'klt(1)', 'klt(1)')]
    with pytest.raises(ValueError, match=r'klt learns from a text first; give --before=FILE'):
        nats_table.check(rows, model, place)


def table(**rows):
    """Rows of bits and nats, at one cut or three."""
    made = {'none': {'fwd': 'raw', 'cuts': [16], 'bits': 32, 'nats_lost': 0}, **rows}
    common = {
        'standard_error': 0.002, 'perplexity': 40.0, 'tokens': 51200, 'learned_tokens': 0,
        'model': 'M', 'text': 'T', 'block': 256, 'batch': 8, 'commit': 'c', 'hardware': 'h',
        'seconds': 60, 'nats_by_block': [3.0], 'learned_from': '',
    }  # fmt: skip
    return lost.Table('nats', {n: {**common, 'name': n, **row} for n, row in made.items()})


TABLE = table(
    a={'fwd': 'outliers(klt(2, entropy=True))', 'cuts': [16], 'bits': 2.304, 'nats_lost': 0.008},
    b={'fwd': 'block(2)', 'cuts': [16], 'bits': 2.5, 'nats_lost': 1.5, 'perplexity': 1234.5},
    c={'fwd': 'mx(4);mx(4);mx(6)', 'cuts': [8, 16, 23], 'bits': 4.25, 'nats_lost': 0.006},
    d={'fwd': 'mx(8)', 'cuts': [8, 16, 23], 'bits': 8.25, 'nats_lost': 0.001},
)


def test_the_row_of_a_bar_is_the_best_within_its_bits():
    lines = [line.split(' | ') for line in lost.bars(TABLE).splitlines()[2:]]
    met = {(line[0].strip('| '), line[1]): line[4] for line in lines}
    assert met == {
        ('one cut', '4.3'): 'missed by 3.5 standard errors',
        ('one cut', '3'): 'missed by 2.5 standard errors',
        ('one cut', '2.3'): 'met',
        ('three cuts', '4.3'): 'missed by 0.5 standard errors',
    }
    assert '`mx(4)`<br>`mx(6)`' in lost.whole(TABLE)
    assert '| one cut | b | `block(2)` | 2.50 | +1.5000 ± 0.0020 | 1,234.50 | 51,200 |' in (
        lost.whole(TABLE)
    )


def test_of_rows_that_send_the_same_the_longest_counts():
    row = {'fwd': 'block(2)', 'cuts': [16], 'bits': 2.2, 'nats_lost': 0.001}
    long = {**row, 'nats_lost': 0.02, 'tokens': 250000}
    assert [r['name'] for r in lost.distinct([*table(a=row, b=long).rows.values()])] == [
        'none',
        'b',
    ]
    assert '| 2.3 | 0.01 | +0.0200 ± 0.0020 |' in lost.bars(table(a=row, b=long))


def test_a_report_of_rows_alone_and_its_marks_in_a_page(rows, place, tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('Here.\n<!-- nats results -->\nold\n<!-- /nats -->\n')
    report.main([str(place), '--out', str(tmp_path / 'r'), '--into', str(page)])
    text = (tmp_path / 'r' / 'report.md').read_text()
    assert '## Table `results`: nats lost' in text
    assert '![Nats lost against bits per element](results_nats.png)' in text
    assert f'| two | `raw`<br>`block(2)` | {rows["two"]["bits"]:.2f} |' in text
    assert (tmp_path / 'r' / 'results_nats.svg').is_file()
    assert 'old' not in page.read_text()
    assert 'rules learned from 256 tokens of other.txt first, which no bits count' in (
        page.read_text()
    )
    assert (tmp_path / 'r' / 'results.csv').read_text().count('\n') == 8
    with pytest.raises(SystemExit, match='has no result of a finished run'):
        report.main([str(tmp_path / 'r'), '--out', str(tmp_path / 's')])


def test_the_study_has_all_families_and_its_texts_are_channels():
    rows = nats_table.rows_of('pretrained_codecs')
    assert len(rows) >= 40
    assert {lost.family(row.fwd) for row in rows if row.fwd != 'raw'} == {*lost.FAMILIES}
    for row in rows:
        for text in (*row.fwd.split(';'), *row.learn.split('|')):
            if text:
                parse(text.strip())
