"""Whether late gradients are proposed, and by how much they make a loss come sooner."""

import pytest

from jaxmp.config import default
from jaxmp.net.speed import Link
from jaxmp.plan import choose, late, planned
from jaxmp.plan.choose import Probed
from jaxmp.plan.late import Measured
from jaxmp.plan.predict import Times
from tests.test_plan import EDGES, RAW

STILL = RAW._replace(nbytes=0.0)


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
