"""Schedules as data: the rules they keep, what they cost, what travels."""

import pytest

from jaxmp.runtimes import schedule
from jaxmp.runtimes.schedule import Action, Transfer

BOTH = [schedule.gpipe, schedule.one_f_one_b]
SIZES = [(s, m) for s in (1, 2, 3, 4, 7) for m in (1, 2, 4, 8, 11)]


@pytest.mark.parametrize('make', BOTH)
@pytest.mark.parametrize(('stages', 'micros'), SIZES)
def test_schedules_keep_the_rules(make, stages, micros):
    actions = make(stages, micros)
    schedule.check(actions)
    assert schedule.size(actions) == (stages, micros, 2 * (stages + micros - 1))
    assert len(actions) == 2 * stages * micros
    assert schedule.bubble(actions) == pytest.approx((stages - 1) / (micros + stages - 1))


@pytest.mark.parametrize(('stages', 'micros'), SIZES)
def test_saved_inputs(stages, micros):
    assert schedule.saved_inputs(schedule.gpipe(stages, micros)) == (micros,) * stages
    saved = schedule.saved_inputs(schedule.one_f_one_b(stages, micros))
    assert saved == tuple(min(micros, stages - s) for s in range(stages))
    assert all(n <= max(1, 2 * (stages - 1 - s)) for s, n in enumerate(saved))


@pytest.mark.parametrize('make', BOTH)
@pytest.mark.parametrize(('stages', 'micros'), SIZES)
def test_links_carry_everything_once_and_in_time(make, stages, micros):
    actions = make(stages, micros)
    found = schedule.transfers(actions)
    assert list(found) == sorted(found, key=lambda e: (e.tick, e.link))
    assert len({(e.tick, e.link) for e in found}) == len(found)
    at = {(t.kind, t.stage, t.microbatch): t.tick for t in actions}
    for link in range(stages - 1):
        for way, kind, sender, reader in (
            ('forward', 'F', link, link + 1),
            ('backward', 'B', link + 1, link),
        ):
            sent = [e for e in found if e.link == link and getattr(e, way) is not None]
            assert sorted(getattr(e, way) for e in sent) == list(range(micros))
            for e in sent:
                assert at[kind, sender, getattr(e, way)] == e.tick
                assert at[kind, reader, getattr(e, way)] > e.tick


@pytest.mark.parametrize('make', BOTH)
def test_both_ends_of_a_link_agree_on_its_order(make):
    """What an end derives from the actions of its own stage and its neighbour's alone."""
    actions = make(4, 5)
    for link in range(3):
        pair = [t._replace(stage=t.stage - link) for t in actions if t.stage in (link, link + 1)]
        alone = [e._replace(link=link) for e in schedule.transfers(pair) if e.link == 0]
        assert alone == [e for e in schedule.transfers(actions) if e.link == link]


def test_1f1b_uses_a_message_at_once_and_links_both_ways():
    actions = schedule.one_f_one_b(4, 8)
    at = {(t.kind, t.stage, t.microbatch): t.tick for t in actions}
    for (kind, s, m), tick in at.items():
        after = (kind, s + (1 if kind == 'F' else -1), m)
        assert at.get(after, tick + 1) == tick + 1
    assert Transfer(6, 0, 3, 0) in schedule.transfers(actions)


BROKEN = [
    ([], 'at least one action'),
    ([Action(1, 0, 0, 'F'), Action(0, 0, 0, 'B')], 'not in order'),
    ([Action(0, 0, 0, 'F'), Action(1, 0, 0, 'W')], 'kind is F or B'),
    ([Action(0, 0, 0, 'F'), Action(0, 0, 0, 'B')], 'two actions at tick 0'),
    ([Action(0, 0, 0, 'F'), Action(1, 0, 0, 'F')], 'is there twice'),
    ([Action(0, 0, 0, 'B'), Action(1, 0, 0, 'F')], 'needs F of micro-batch 0 in stage 0'),
    ([Action(0, 0, 0, 'F'), Action(0, 1, 0, 'F')], 'needs F of micro-batch 0 in stage 0'),
    ([Action(0, 0, 0, 'F')], 'have 2 actions, got 1'),
]


@pytest.mark.parametrize(('actions', 'message'), BROKEN)
def test_check_names_what_is_broken(actions, message):
    with pytest.raises(ValueError, match=message):
        schedule.check(actions)


def test_backward_waits_for_the_next_stage():
    good = [t for t in schedule.gpipe(2, 1) if t != Action(2, 1, 0, 'B')]
    with pytest.raises(ValueError, match='needs B of micro-batch 0 in stage 1'):
        schedule.check(good)


@pytest.mark.parametrize('make', BOTH)
@pytest.mark.parametrize('numbers', [(0, 1), (1, 0), (2.0, 1), (True, 1)])
def test_sizes_are_positive_integers(make, numbers):
    with pytest.raises(ValueError, match='positive number of'):
        make(*numbers)


def test_draw_writes_a_picture(tmp_path):
    path = tmp_path / 'timeline.png'
    schedule.draw(schedule.one_f_one_b(3, 4), path)
    assert path.read_bytes()[:4] == b'\x89PNG'
