"""The page of results: its tables by committed rows, and the picture of the README."""

import pytest

from study.report import answers, glance, lost, results
from study.report import command as report
from study.report.claims import judge, telling
from tests.base import ROOT


@pytest.fixture(scope='module')
def known():
    studies = results.load(ROOT / 'results')
    return {s.name: s for s in (*studies, *lost.load(ROOT / 'results'))}


def cells(table, first):
    [line] = [line for line in table.splitlines() if line.startswith(f'| {first}')]
    return line.strip('| ').split(' | ')


def test_a_cell_is_what_its_row_loses_against_no_compression(known):
    """Of accuracies the sign is turned: more is worse in all rows."""
    table = answers.by_bits(known)
    none, own = (known['few_bits_converged'].rows[n] for n in ('none', 'block4'))
    e = results.difference(own, none)
    want = f'**{-e.mean:+.2f} [{-e.high:+.2f}, {-e.low:+.2f}], 5 seeds**<br>`block4`, 4.50 bits'
    assert cells(table, 'ResNet-18')[1] == want
    rows = known['few_bits_text'].rows
    e = results.difference(rows['embedded32-triples3'], rows['embedded'])
    assert cells(table, 'GPT from nothing')[4].startswith(f'**{e.mean:+.3f} [')
    row = known['pretrained_codecs'].rows['klt3-long']
    assert cells(table, 'SmolLM2-135M-Instruct, one cut')[2].startswith(f'**{lost.lost(row)}**')


def test_a_row_that_was_not_run_is_not_measured(known):
    few = {n: s for n, s in known.items() if n == 'few_bits_tune'}
    rows = {n: r for n, r in few['few_bits_tune'].rows.items() if n != 'anchors2'}
    table = answers.by_bits({'few_bits_tune': few['few_bits_tune']._replace(rows=rows)})
    assert cells(table, 'ResNet-18')[1:] == ['not measured'] * 4
    assert [c == 'not measured' for c in cells(table, 'Small GPT-2')] == [
        False, False, False, True, False,
    ]  # fmt: skip
    assert '`anchors2`' not in answers.codecs({'few_bits_tune': few['few_bits_tune']._replace(
        rows=rows)})  # fmt: skip


def test_a_row_of_other_bits_than_its_column_is_refused(known):
    task = {'task': 'x', 'study': 'few_bits_converged', 'rows': ['block2', *['none'] * 3]}
    with pytest.raises(ValueError, match=r'^block2 of few_bits_converged has 2\.50 bits, not 4 to'):
        answers.costs(task, known)


@pytest.mark.slow
def test_a_claim_stands_at_the_first_scale_that_ran_its_primary_quantity(known):
    names = 'converged', 'mnist', 'cpu'
    table = answers.nine(*(known[n] for n in names))
    verdicts = {n: judge(known[n]) for n in names}
    lines = table.splitlines()[4:]
    assert len(lines) == 9
    for i, line in enumerate(lines):
        ran = [n for n in names if telling(verdicts[n][i]).ours]
        said = verdicts[ran[0]][i]
        cell = line.strip('| ').split(' | ')
        assert cell[1].startswith(f'**{said.verdict}**<br>')
        assert answers.with_unit(telling(said), telling(said).ours) in cell[2]
    gradients = cells(table, 'Gradients are more')
    assert gradients[1] == '**undecided**<br>as claimed'
    assert gradients[4:] == [
        'no margin: claimed above 0',
        '**CIFAR-10**<br>MNIST: supported<br>600 steps of CIFAR-10: undecided',
    ]  # fmt: skip
    top = cells(table, 'Top10 %')
    assert (top[1], top[4]) == ('**contradicted**<br>opposite', 'at none from 0.5 to 50 %')
    assert cells(table, 'Fine-tuning')[5].startswith('**small GPT-2, 7 checkpoints**<br>')
    supported = sum('| **supported**<br>' in line for line in lines)
    assert table.startswith(f'Of 9 claims: {supported} supported, ')
    assert 'contradict each other on 1.' in table.splitlines()[0]


def test_marks_of_all_studies_need_no_name(known):
    studies = [known['few_bits_tune']]
    text = '<!-- bits -->\nold\n<!-- /bits -->\n'
    assert 'old' not in report.renew(text, studies)
    assert '**+0.026, 1 seed**<br>`block4`' in report.renew(text, studies)
    with pytest.raises(ValueError, match=r"^no study 'x'; allowed are few_bits_tune"):
        report.renew('<!-- claims x -->\n<!-- /claims -->', studies)


def test_the_picture_of_the_paper_names_rows_of_the_table(known, tmp_path):
    table = known['pretrained_codecs']
    assert glance.draw(table, tmp_path) == glance.FILE
    shown = f'report/{glance.FILE}'.replace('png', 'svg')
    assert shown in (ROOT / 'docs' / 'paper.md').read_text()
    drawn = (tmp_path / glance.FILE).with_suffix('.svg').read_text()
    assert all(f'<!-- {name} -->' in drawn for name in glance.POINTS.values())
    assert f'loses {table.rows["klt3-long"]["nats_lost"]:.2g} nats at 3 bits' in drawn
    few = table._replace(rows={n: r for n, r in table.rows.items() if n != 'nvfp4'})
    assert glance.draw(few, tmp_path) == ''
