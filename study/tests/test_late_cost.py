"""What late gradients cost: the ratio of steps, the report's table, what `jaxmp plan` proposes."""

import json

import pytest

from jaxmp.config import KEYS, default
from jaxmp.plan import late
from study.report import command as report
from study.report import late as cost
from study.report import results
from tests.base import ROOT


def summary(name, losses, seed=0, fwd='raw', **optimizer):
    """A run of four tests, 10 steps apart."""
    config = default().to_dict()
    config['model'].update(name='pretrained', path='weights.gguf', train='lora(8)')
    config['optimizer'].update(optimizer, name='adamw')
    test = {'loss': losses[-1], 'accuracy': 0.5, 'epoch': 1}
    curve = {'step': [10, 20, 30, 40], 'loss': losses, 'accuracy': [0.5] * 4}
    return {
        'name': name, 'seed': seed, 'fwd': fwd, 'bwd': fwd, 'measure': 'perplexity', 'steps': 40,
        'config': {**config, 'name': name, 'fwd': fwd, 'bwd': fwd, 'seed': seed}, 'phases': [],
        'epochs': 1, 'seconds': 1.0, 'commit': 'c', 'hardware': 'h',
        'bytes': [{'uncompressed': 4, 'forward': 4, 'backward': 4}],
        'test': {mode: {'best': test, 'last': test} for mode in ('off', 'on')},
        'history': dict.fromkeys(('train', 'off', 'on'), curve),
    }  # fmt: skip


RUNS = (
    summary('late0', [4.0, 3.0, 2.0, 1.0]),
    summary('late0', [4.0, 3.0, 2.0, 1.0], seed=1),
    summary('late1', [4.5, 3.5, 2.5, 1.5], delay=1),
    summary('late1', [4.0, 3.0, 2.0, 0.5], seed=1, delay=1),
    summary('late4', [6.0, 5.0, 4.5, 4.0], delay=4, correction='predict'),
    summary('late1-2bit', [4.0, 3.0, 2.0, 1.0], fwd='uniform(2)', delay=1),
)
BY_STAGE = summary(
    'late4-stage',
    [4.0, 3.0, 2.5, 2.0],
    delay=4,
    correction='predict',
    delay_by_stage=True,
    lr=1e-3,
    adamw_scale=2.0,
)


@pytest.fixture
def study(tmp_path):
    for run in RUNS:
        (tmp_path / f'{run["name"]}-s{run["seed"]}.json').write_text(json.dumps(run))
    [found] = results.load(tmp_path)
    return found


def test_steps_are_compared_at_the_lowest_loss_that_both_reach(study):
    """Of 1.5 the run on time has it after 35 steps of 40; a better one has 1 after 36 2/3."""
    on_time, late1, late4 = cost.rows(study)  # that of two bits has none on time beside it
    assert (on_time.delay, late1.delay, late4.delay) == (0, 1, 4)
    assert (on_time.steps.mean, on_time.more.mean) == (1.0, 0.0)
    assert late1.steps.mean == pytest.approx((40 / 35 + (30 + 20 / 3) / 40) / 2)
    assert late1.more.mean == pytest.approx((0.5 - 0.5) / 2)
    assert (late1.training, late1.optimizer, late1.compressed) == ('LoRA', 'adamw', False)
    assert (late4.correction, late4.steps.mean, late4.more.mean) == ('predict', 40 / 10, 3.0)
    assert [row['delay'] for row in cost.record([study])] == [1, 4]
    assert cost.record([study])[0]['seeds'] == 2


def test_each_delay_has_a_rate_of_its_own(study, tmp_path):
    """Rows of one delay have one."""
    where = tmp_path / 'rates'
    where.mkdir()
    slow = summary('late1', [4.5, 3.5, 2.5, 1.5], delay=1, lr=1e-3, warmup='50%')
    for run in (RUNS[0], slow):
        (where / f'{run["name"]}.json').write_text(json.dumps(run))
    [found] = results.load(where)
    assert [row.delay for row in cost.rows(found)] == [0, 1]
    predicted = summary('late1-predict', [4.0] * 4, delay=1, correction='predict')
    (where / 'predict.json').write_text(json.dumps(predicted))
    with pytest.raises(ValueError, match=r'late1 and late1-predict .* optimizer.lr=0.001 and'):
        results.load(where)


def test_a_row_by_stage_is_one_of_its_own(tmp_path):
    for run in (*RUNS[:2], RUNS[4], BY_STAGE):
        (tmp_path / f'{run["name"]}-s{run["seed"]}.json').write_text(json.dumps(run))
    [found] = results.load(tmp_path)
    _, late4, by_stage = cost.rows(found)
    assert (late4.by_stage, by_stage.by_stage, by_stage.delay) == (False, True, 4)
    assert (late4.more.mean, by_stage.more.mean) == (3.0, 1.0)
    assert '| predict | 40 | 4, by stage | 2.0000 | 100.00 |' in cost.table([found])
    assert [row['by_stage'] for row in cost.record([found])] == [False, True]
    assert cost.lines(cost.rows(found))['predict by stage'] == [(0, 1.0), (4, 2.0)]
    assert cost.title(cost.rows(found)).endswith('1e+02 % of the loss with predict by stage')


def test_the_planner_reads_the_shortest_of_two_trainings(study, tmp_path):
    """Late gradients cost less in a longer one."""
    where = tmp_path / 'long'
    where.mkdir()
    for run in (RUNS[0], summary('late1', [4.0, 3.0, 2.0, 1.0], delay=1)):
        (where / f'{run["name"]}.json').write_text(json.dumps({**run, 'steps': 160}))
    [long] = results.load(where)
    assert [row.length for row in cost.rows(long)] == [160, 160]
    short = cost.record([study])
    assert short[0]['steps'] > 1.0
    assert cost.record([long, study]) == cost.record([study, long]) == short


def test_a_study_without_late_rows_has_no_table_of_them(study):
    assert cost.rows(study._replace(rows={'late0': study.rows['late0']})) == []


def test_a_report_shows_the_loss_by_delay(study, tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('<!-- late -->\n<!-- /late -->')
    report.main([str(tmp_path), '--out', str(tmp_path / 'out'), '--into', str(page)])
    row = '| LoRA, adamw | raw | predict | 40 | 4 | 4.0000 | 300.00 | 4.000 | 1 |'
    assert row in page.read_text()
    assert row in (tmp_path / 'out' / 'report.md').read_text()
    assert cost.lines(cost.rows(study)) == {
        'uncorrected': [(0, 1.0), (1, 1.0)], 'predict': [(0, 1.0), (4, 4.0)]
    }  # fmt: skip
    assert cost.title(cost.rows(study)) == '1 step late costs 0 % uncorrected'
    name = cost.draw(study, tmp_path / 'out')
    assert [p.name for p in (tmp_path / 'out').glob('*.png')] == [name]  # none of bits
    assert (tmp_path / 'out' / name).stat().st_size > 5000


def test_what_the_planner_reads_follows_from_committed_results():
    """`python -m study.report.late results/late jaxmp/plan/late.json` writes it again."""
    studies = sorted(results.load(ROOT / 'results' / 'late'), key=lambda study: study.name)
    assert late.MEASURED.read_text() == cost.text(studies)
    assert {row.training for row in late.table()} >= {'LoRA'}


def test_no_correction_that_has_left_is_proposed():
    """Results of them stay in the table, and none of them is the best."""
    known = {(row.training, row.optimizer) for row in late.table()}
    best = [
        row.correction
        for case in known
        for compressed in (False, True)
        for row in late.best_of(late.table(), *case, compressed)
    ]
    assert {'scale', 'compensate'} <= {row.correction for row in late.table()}
    assert {*best} <= {*KEYS['optimizer.correction'].words}


# What is proposed.
