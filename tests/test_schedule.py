"""Schedules as data: the rules they keep, what they cost, what travels."""

import importlib
import random

import pytest

from jaxmp.config import KEYS
from jaxmp.runtimes import schedule, schedules
from jaxmp.runtimes.schedule import Action, Costs, timed
from jaxmp.runtimes.schedules import SCHEDULES, Plan, most_kept, stream
from jaxmp.training.late import delays_of
from tests.base import ROOT

DEVICES = (1, 2, 3, 4, 5, 8)
UNEQUAL = Costs(1.0, 1.4, 0.9)


def sizes(name):
    """Stages and micro-batches that a schedule takes."""
    chunks = 2 if name in ('interleaved', 'zb_v') else 1
    for d in DEVICES:
        for m in (d, 2 * d, 3 * d) if name == 'interleaved' else (1, 2, d, 2 * d + 3):
            yield chunks * d, m


def near(value):
    return pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize('costs', [Costs(), UNEQUAL, Costs(1, 2, 1, 0.4)], ids=str)
@pytest.mark.parametrize('name', SCHEDULES)
def test_schedules_keep_the_rules(name, costs):
    for stages, microbatches in sizes(name):
        actions = SCHEDULES[name](stages, microbatches, costs)
        schedule.check(actions)
        assert schedule.size(actions)[:2] == (stages, microbatches)
        kinds = 3 if name.startswith('zb') else 2
        assert len(actions) == kinds * stages * microbatches
        ends = {(a.kind, a.stage, a.microbatch): a.end for a in actions}
        for a in actions:  # a message takes its time, but not within a device
            step = {'F': -1, 'B': 1, 'W': 0}[a.kind]
            sent = ends.get((a.kind, a.stage + step, a.microbatch)) if step else None
            if sent is not None:
                apart = schedule.place(actions)[a.stage + step] != a.device
                assert a.start >= sent + costs.message * apart


# Bubbles, as time without work of one device: the formulas of the papers.


def inside(actions):
    """Time without an action of each device between its first and its last."""
    for d in {*schedule.place(actions)}:
        own = schedule.order(actions, d)
        yield own[-1].end - own[0].start - sum(a.end - a.start for a in own)


@pytest.mark.parametrize('costs', [Costs(), UNEQUAL], ids=str)
@pytest.mark.parametrize('make', [schedules.gpipe, schedules.one_f_one_b, schedules.eager_1f1b])
def test_bubble_of_1f1b(make, costs):
    """(D - 1)(F + B + W), arXiv 2401.10241 table 2, of M + D - 1 times that sum."""
    for d in DEVICES:
        for m in (1, d, 3 * d + 1):
            actions = make(d, m, costs)
            assert schedule.bubble(actions) == near((d - 1) / (m + d - 1))
            assert schedule.size(actions)[2] == near((m + d - 1) * sum(costs))


@pytest.mark.parametrize('chunks', [1, 2, 3])
def test_bubble_of_interleaved(chunks):
    """(D - 1) / V of the M of one device, arXiv 2104.04473 section 2.2."""
    for d in DEVICES:
        for m in (d, 4 * d):
            actions = schedules.interleaved(chunks * d, m, UNEQUAL, chunks)
            assert schedule.bubble(actions) == near((d - 1) / (chunks * m + d - 1))


def test_bubbles_of_zero_bubble_schedules():
    """H1: (D - 1)(F + B - W), H2: none between the actions of a device, arXiv 2401.10241 table 2.

    No schedule ends before the last device could, which begins after (D - 1) F / V.
    """
    for d in DEVICES:
        for m in (2 * d, 3 * d + 1, 4 * d + 2):
            bound = 3 * m + d - 1
            one, two, vee = schedules.zb_h1(d, m), schedules.zb_h2(d, m), schedules.zb_v(2 * d, m)
            assert schedule.size(one)[2] == 3 * m + (d - 1) * (1 + 1 - 1) == bound
            assert schedule.size(two)[2] == bound
            assert [*inside(two)] == [0] * d
            more = schedule.size(vee)[2] - (3 * m + (d - 1) / 2)
            assert 0 <= more <= 0.5
    assert max(inside(schedules.zb_h1(4, 8))) == 3


def test_a_few_halves_are_enough():
    """2 (D - 1) backwards in two halves make ZB-H2's step; each makes it a W shorter."""
    for d in DEVICES:
        for m in (3 * d, 4 * d + 1):
            whole = schedule.size(schedules.eager_1f1b(d, m))[2]
            for k in range(1, 2 * d + 1):
                actions = schedules.named(f'zb_h2(2, {k})')(d, m)
                schedule.check(actions)
                assert schedule.size(actions)[2] == whole - min(k, 2 * (d - 1))
                split = {a.microbatch for a in actions if a.kind == 'W'}
                assert split == {*range(m - min(k, m), m)}
                if k <= 2 * (d - 1):
                    most = [max(k, 2 * (d - s) - 1) for s in range(d)]
                    assert [*schedule.saved_inputs(actions)] == most
        assert schedules.zb_h2(d, 3 * d, last=3 * d) == schedules.zb_h2(d, 3 * d)


def test_messages_of_eager_1f1b_are_hidden():
    """They take 2 (D - 1) times c in all; 1F1B waits for them in each round."""
    for c in (0.5, 1.0, 1.5):
        costs = Costs(message=c)
        assert schedule.size(schedules.eager_1f1b(4, 20, costs))[2] == 3 * 20 + 3 * (3 + 2 * c)
        assert schedule.bubble(schedules.one_f_one_b(4, 20, costs)) > 0.1 + schedule.bubble(
            schedules.eager_1f1b(4, 20, costs)
        )


def test_saved_inputs():
    for d in DEVICES:
        for m in (1, d, 3 * d):
            most = {
                'gpipe': [m] * d,
                '1f1b': [d - s for s in range(d)],
                'eager_1f1b': [2 * (d - s) - 1 for s in range(d)],
                'zb_h1': [d] * d,
                'zb_h2': [2 * d - 1] * d,
                'zb_v': [2 * d] * d,
            }
            for name, counts in most.items():
                chunks = 1 + (name == 'zb_v')
                found = schedule.saved_inputs(SCHEDULES[name](chunks * d, m))
                assert all(
                    n <= min(chunks * m, most) for n, most in zip(found, counts, strict=True)
                )
                assert m < 3 * d or found == tuple(counts), name
        found = schedule.saved_inputs(schedules.interleaved(2 * d, 3 * d))
        assert found == tuple(2 * (d - s - 1) + d + 1 for s in range(d))


def test_any_plan_ends():
    draw = random.Random(0)
    for _ in range(60):
        devices = draw.randint(1, 4)
        place = [*range(devices), *(draw.randrange(devices) for _ in range(draw.randint(0, 4)))]
        draw.shuffle(place)
        own = [place.count(d) for d in range(devices)]
        caps = ([draw.randint(n, n + 4) for n in own] for _ in range(2))
        microbatches = draw.randint(1, 7)
        plan = Plan(place, draw.randint(0, microbatches), *caps)
        costs = Costs(*(draw.choice([0.3, 1, 2]) for _ in range(3)), draw.choice([0, 0.7, 5]))
        actions = schedules.run(plan, microbatches, costs)
        schedule.check(actions)
        assert sum(a.kind == 'W' for a in actions) == plan.split * len(place)
        assert schedule.place(actions) == tuple(place)


@pytest.mark.parametrize(
    'plan',
    [
        Plan((0, 1), 0, (1, 0), (1, 1)),
        Plan((0, 1), 2, (1, 1), (1,)),
        Plan((0, 2), 2, (1, 1), (1, 1)),
        Plan((0, 0), 2, (2, 2), (2, 2)),
        Plan((0, 1, 0), 2, (2, 1), (1, 1)),
    ],
)
def test_a_plan_has_a_stage_and_caps_for_every_device(plan):
    with pytest.raises(ValueError, match=r'devices 0, 1, \.\.\. need stages, and two caps'):
        schedules.run(plan, 2)


# Orders of one's own.


def test_an_order_alone_makes_the_same_schedule():
    for name in SCHEDULES:
        costs = Costs(1, 1.5, 0.5, 0.25)
        actions = SCHEDULES[name](4, 8, costs)
        orders = {
            d: [(a.kind, a.stage, a.microbatch) for a in schedule.order(actions, d)]
            for d in {*schedule.place(actions)}
        }
        assert timed(orders, costs) == actions


DEADLOCKS = [
    ({0: [('B', 0, 0), ('F', 0, 0)]}, 'B of micro-batch 0 in stage 0 can .* F of micro-batch 0 in'),
    (
        {0: [('F', 0, 0), ('B', 0, 0)], 1: [('B', 1, 0), ('F', 1, 0)]},
        'B of micro-batch 0 in stage 1 can never run: F of micro-batch 0 in stage 1 does not',
    ),
    ({0: [('F', 0, 0), ('F', 1, 1)]}, 'F of micro-batch 1 in stage 1 can never .* in stage 0 does'),
    (
        {0: [('F', 0, 0), ('F', 2, 0), ('F', 0, 1)], 1: [('F', 1, 1), ('F', 1, 0)]},
        'F of micro-batch 0 in stage 2 can never run: F of micro-batch 0 in stage 1 does not',
    ),
]


@pytest.mark.parametrize(('orders', 'message'), DEADLOCKS)
def test_an_order_that_never_ends_is_refused(orders, message):
    with pytest.raises(ValueError, match=message):
        timed(orders)


def test_costs_are_times():
    for costs in (Costs(0), Costs(1, 1, -1), Costs(message=-1)):
        with pytest.raises(ValueError, match='F, B and W take some time'):
            timed({0: [('F', 0, 0)]}, costs)


# What travels.


@pytest.mark.parametrize('name', SCHEDULES)
def test_messages_are_sent_once_when_their_sender_ends(name):
    actions = SCHEDULES[name](4, 8, Costs(message=0.5))
    found = schedule.messages(actions)
    assert list(found) == sorted(found, key=lambda m: (m.sent, m.source))
    ends = {(a.kind, a.stage, a.microbatch): a.end for a in actions}
    assert len(found) == 2 * 3 * 8 == len({m[1:] for m in found})
    for m in found:
        assert ends[m.kind, m.source, m.microbatch] == m.sent
        assert m.target - m.source == {'F': 1, 'B': -1}[m.kind]


def test_both_ends_of_a_link_agree_on_its_order():
    """What an end derives from the actions of its own stage and its neighbour's alone."""
    for make in (schedules.gpipe, schedules.one_f_one_b, schedules.zb_h2):
        actions = make(4, 5)
        for link in range(3):
            pair = [a._replace(stage=a.stage - link) for a in actions if a.stage - link in (0, 1)]
            alone = [m[3:] for m in schedule.messages(pair)]
            ends = (link, link + 1)
            assert alone == [
                m[3:] for m in schedule.messages(actions) if {m.source, m.target} == {*ends}
            ]


# What is refused.


def action(start, stage, microbatch, kind, device=0):
    return Action(start, stage, microbatch, kind, device, start + 1)


BROKEN = [
    ([], 'at least one action'),
    ([action(1, 0, 0, 'F'), action(0, 0, 0, 'B')], 'not in order'),
    ([action(0, 0, 0, 'F'), action(1, 0, 0, 'FB')], 'kind is F, B or W'),
    ([action(-1, 0, 0, 'F')], 'numbers start at 0'),
    ([action(0, 0, 0, 'F')._replace(end=0)], 'the end is after the start'),
    ([action(0, 0, 0, 'F'), action(0.5, 0, 1, 'F')], 'its device is busy'),
    ([action(0, 0, 0, 'F'), action(1, 0, 0, 'F')], 'is there twice'),
    ([action(0, 0, 0, 'F'), action(1, 0, 1, 'F', 1)], 'its stage is on device 0 too'),
    ([action(0, 0, 0, 'B'), action(1, 0, 0, 'F')], 'needs F of micro-batch 0 in stage 0'),
    ([action(0, 0, 0, 'F'), action(0, 1, 0, 'F', 1)], 'needs F of micro-batch 0 in stage 0'),
    ([action(0, 0, 0, 'F'), action(1, 0, 0, 'W')], 'needs B of micro-batch 0 in stage 0'),
    ([action(0, 0, 0, 'F')], 'have 2 forwards and backwards, got 1; every stage runs F and B'),
    (schedules.gpipe(2, 2)[:-1], 'have 8 forwards and backwards, got 7; every stage runs F and B'),
    (
        [a for a in schedules.gpipe(2, 1) if a[1:4] != (1, 0, 'B')],
        'needs B of micro-batch 0 in stage 1',
    ),
]


@pytest.mark.parametrize(('actions', 'message'), BROKEN)
def test_check_names_what_is_broken(actions, message):
    with pytest.raises(ValueError, match=message):
        schedule.check(actions)


@pytest.mark.parametrize('make', SCHEDULES.values())
@pytest.mark.parametrize('numbers', [(0, 2), (2, 0), (2.0, 2), (True, 2)])
def test_sizes_are_positive_integers(make, numbers):
    with pytest.raises(ValueError, match='positive number of'):
        make(*numbers)


def test_stages_and_microbatches_divide():
    for make in (schedules.zb_v, schedules.interleaved):
        with pytest.raises(ValueError, match='3 stages cannot be placed as 2 on each device'):
            make(3, 4)
    with pytest.raises(ValueError, match='takes micro-batches in groups of 2, and there are 3'):
        schedules.interleaved(4, 3)


def test_the_configuration_has_the_names_of_all_schedules():
    assert {*KEYS['parallel.schedule'].words} == {*SCHEDULES}
    assert KEYS['parallel.schedule'].pattern == schedules.NUMBERED


def test_forwards_ahead_per_later_stage():
    """Messages of up to (n - 1) 3 / 2 cost nothing between the first and the last micro-batch."""
    for n in (1, 2, 3, 4):
        actions = schedules.named(f'eager_1f1b({n})')(4, 20)
        assert schedule.saved_inputs(actions) == tuple(1 + n * d for d in (3, 2, 1, 0))
        assert schedule.saved_inputs(schedules.named(f'zb_h2({n})')(4, 20)) == (1 + 3 * n,) * 4
        costs = Costs(message=1.5 * (n - 1))
        made = schedules.eager_1f1b(4, 20, costs, n)
        assert schedule.size(made)[2] == 3 * 20 + 3 * (3 + 2 * costs.message)
    for text in (
        'eager_1f1b(0)',
        'gpipe(2)',
        'eager_1f1b(2',
        '2',
        'eager_1f1b(2, 2)',
        'zb_h2(2, 0)',
    ):
        assert schedules.named(text) is None, text


def test_the_page_has_the_tables_that_the_code_computes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'docs'))
    tables = importlib.import_module('schedules').tables()
    assert '| `1f1b` | 0.273 |' in tables
    assert tables in (ROOT / 'docs' / 'runtimes.md').read_text()


def test_the_page_of_late_gradients_has_the_table_that_the_code_computes(monkeypatch):
    """A pipeline that stays full takes its computing; others add their fill and the messages."""
    monkeypatch.syspath_prepend(str(ROOT / 'docs'))
    late = importlib.import_module('late')
    steps = {name: late.step_time(late.actions(name)) for name in late.NAMES}
    assert steps['late'] == late.MICROBATCHES * 3.0
    fill = (late.DEVICES - 1) * (3.0 + 2 * late.COSTS.message)
    assert steps['eager_1f1b'] == steps['late'] + fill < steps['1f1b']
    assert late.table() in (ROOT / 'docs' / 'late.md').read_text()


@pytest.mark.parametrize(
    ('stages', 'microbatches', 'delay'), [(1, 2, 1), (2, 2, 2), (4, 8, 1), (4, 3, 3)]
)
def test_late_gradients_keep_the_rules_and_the_activations_that_are_said(
    stages, microbatches, delay
):
    for message in (0.0, 30.0):
        costs = Costs(1, 1, 1, message)
        delays = (delay,) * stages
        actions = stream(range(stages), microbatches, delays, 5, costs)
        schedule.check(actions)
        kept, said = schedule.most_kept(actions), most_kept(microbatches, delays)
        assert all(k <= most for k, most in zip(kept, said, strict=True))
    assert kept == said  # over a long way all of them are


@pytest.mark.parametrize('by_stage', [False, True])
@pytest.mark.parametrize(
    ('message', 'delay'), [(0.5, 1), (10, 1), (10, 2), (30, 1), (30, 2), (30, 4)]
)
def test_late_gradients_hide_a_part_of_the_way_for_each_step(message, delay, by_stage):
    """A step computes, or takes a part of the time from its first forward to its last backward.

    That later stages are less late costs no time.
    """
    stages, microbatches, steps = 4, 8, 6 * (delay + 1)
    delays = delays_of(delay, by_stage, stages, copied=False)
    actions = stream(range(stages), microbatches, delays, steps, Costs(1, 1, 1, message))
    ends = {a.microbatch: a.end for a in actions if (a.stage, a.kind) == (0, 'B')}
    end = lambda batch: ends[microbatches * (batch + 1) - 1]
    step = (end(5 * (delay + 1)) - end(2 * (delay + 1))) / (3 * (delay + 1))
    computing = 3 * microbatches
    way = 2 * (stages - 1) * message + 3 * stages + 3 * (microbatches - 1)
    assert step == pytest.approx(max(computing, way / (delay + 1)), rel=0.06)
