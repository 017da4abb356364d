"""What late gradients cost: the ratio of steps, the report's table, what `jaxmp plan` proposes."""

import json

import pytest

from jaxmp.config import KEYS, default
from jaxmp.net.speed import Link
from jaxmp.plan import choose, late, planned
from jaxmp.plan.choose import Probed
from jaxmp.plan.late import Measured
from jaxmp.plan.predict import Times
from jaxmp.report import __main__ as report
from jaxmp.report import late as cost
from jaxmp.report import results
from tests.runs import ROOT
from tests.test_plan import EDGES, RAW

STILL = RAW._replace(nbytes=0.0)


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
    """`python -m jaxmp.report.late results/late jaxmp/plan/late.json` writes it again."""
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


def probed(count=8, **more):
    """Three stages whose micro-batches take 1 and 2 ms, and a step 24."""
    return Probed({count: [Times(1e-3, 2e-3)] * 3}, {e: [STILL] for e in EDGES}, **more)


def chosen(given, link):
    return choose.choose(given, link, 0.1)


@pytest.mark.parametrize(
    ('delay', 'seconds'), [(1, 24e-3), (2, 24e-3)], ids=['one step', 'two steps']
)
def test_a_full_pipeline_takes_its_computing(delay, seconds):
    """A way to the last stage and back takes 9 ms of actions and 4 messages of 3 ms: 21 of 24."""
    given, link = probed(), Link(8.0, 3.0)
    codecs = chosen(given, link).codecs
    assert late.late_step(given, link, codecs, 8, delay) == pytest.approx(seconds)
    assert late.covering(given, link, codecs, 8) == (1, pytest.approx(24e-3))


def test_a_longer_way_needs_a_larger_delay_and_bytes_none():
    given = probed()
    codecs = chosen(given, Link(8.0, 20.0)).codecs
    assert late.covering(given, Link(8.0, 20.0), codecs, 8) == (4, pytest.approx(24e-3))
    sent = dict.fromkeys(EDGES, STILL._replace(nbytes=4e4))  # 40 ms of a step
    assert late.covering(given, Link(8.0), sent, 8) == (1, pytest.approx(40e-3))


def test_parameters_are_moved_once_a_step_and_a_tied_table_is_waited_for():
    given = probed()
    times = [t._replace(update=4e-3) for t in given.stages[8]]
    link, codecs = Link(8.0, 3.0), chosen(given, Link(8.0, 3.0)).codecs
    moving = given._replace(stages={8: times})
    assert late.late_step(moving, link, codecs, 8, 1) == pytest.approx(28e-3)
    waits = moving._replace(normed=True)  # for a norm that nobody is told beside the work
    assert late.late_step(waits, link, codecs, 8, 1) == pytest.approx(31e-3)
    tied = waits._replace(table=1e3)  # 3 and 1 ms, then the norm's 3
    assert late.late_step(tied, link, codecs, 8, 1) == pytest.approx(35e-3)


ROW = Measured('from nothing', 'sgd', 1, False, 'none', False, 1.25, 0.01, 3)
ROWS = (
    ROW,
    ROW._replace(correction='predict', steps=1.5),
    ROW._replace(delay=4, correction='predict', steps=1.3, seeds=1),
    ROW._replace(training='LoRA', steps=1.0),
    ROW._replace(optimizer='muon', steps=1.0),
)


def proposed(link, rows, **optimizer):
    config = default()
    config.optimizer.update(optimizer)
    return late.proposal(config, probed(), chosen(probed(), link), link, rows)


def test_predicted_steps_are_weighed_by_the_measured_ratio():
    """At 20 ms eager 1F1B takes 24 ms, 9 and 80; four steps late it is 24."""
    link = Link(8.0, 20.0)
    step = chosen(probed(), link).seconds
    assert proposed(link, ROWS) == (
        'Late gradients (`--config.optimizer.delay=4 --config.optimizer.correction=predict '
        f'--config.parallel.schedule=1f1b`): predicted step 24 ms for {1e3 * step:.3g} ms, times '
        '1.300 as many steps to a loss (measured: from nothing with sgd, raw messages, 1 seed), so '
        f'{step / 24e-3 / 1.3:.2f} times faster to a loss. A stage but the last keeps up to 5 '
        'versions of its weights.'
    )
    sooner = ROWS[2]._replace(by_stage=True, steps=1.1)  # a step takes as long
    text = proposed(link, (*ROWS, sooner))
    assert '=4 --config.optimizer.delay_by_stage=True --config.optimizer.correction=' in text
    assert 'predicted step 24 ms ' in text
    few = ROWS[0]._replace(delay=4, steps=9.0)
    assert 'delay=1 ' in proposed(link, (few, *ROWS[:2]))


def test_of_alike_ones_the_least_delay_with_the_best_correction_is_proposed():
    text = proposed(Link(8.0, 3.0), (ROW._replace(steps=1.0), *ROWS[1:], ROW._replace(delay=2)))
    assert 'optimizer.delay=1 --config.parallel.schedule=1f1b`' in text
    assert '1.000 as many' in proposed(Link(8.0, 3.0), (ROW._replace(steps=0.9),))


def test_the_least_delay_is_one_that_pays(monkeypatch):
    """One that gains less than 5 % does not hide one that gains more."""
    link = Link(8.0, 3.0)
    seconds = chosen(probed(), link).seconds
    shares = {1: 0.953, 4: 0.945}
    step = lambda probed, link, codecs, count, delay, by_stage: shares[delay] * seconds
    monkeypatch.setattr(late, 'late_step', step)
    rows = [ROW._replace(steps=1.0, delay=n) for n in shares]
    assert 'optimizer.delay=4 ' in proposed(link, rows)
    assert proposed(link, rows[:1]) == ''


def test_nothing_is_proposed_that_gains_nothing_or_was_not_measured():
    near = Link(8.0, 3.0)
    assert proposed(near, (ROW._replace(steps=2.0),)) == ''
    assert proposed(near, ROWS, name='adamw') == (
        'Late gradients (`optimizer.delay=1`) would take 24 ms a step for '
        f'{1e3 * chosen(probed(), near).seconds:.3g} ms. They are not proposed: how many more '
        'steps from nothing with adamw then takes to a loss was not measured.'
    )
    many, link = probed(64), Link(8.0)  # the fill is 3 % of a step
    assert late.proposal(default(), many, chosen(many, link), link, ROWS[-1:]) == ''


def test_compressed_messages_have_a_ratio_of_their_own_where_it_was_measured():
    small = ROW._replace(compressed=True, steps=1.1)
    pick = lambda rows, compressed: late.best_of(rows, 'from nothing', 'sgd', compressed)
    assert pick((ROW, small), True) == [small]
    assert pick((ROW, small), False) == [ROW]
    assert pick((ROW,), True) == [ROW]
    assert pick((small,), False) == []


def test_a_plan_is_not_made_of_a_configuration_that_is_late_already():
    config = default()
    config.optimizer.delay = 2
    with pytest.raises(ValueError, match=r'delay=2: it is weighed here .*; leave it out'):
        planned.probed_experiment(config)
