"""The planner: a step predicted by hand, the choice on made-up numbers, a file that runs."""

import itertools
import math
import re
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import spec
from jaxmp.config import complete, files
from jaxmp.grammar import sinks
from jaxmp.net.speed import Link, parse
from jaxmp.plan import __main__ as command
from jaxmp.plan import (
    candidates,
    choose,
    loss,
    planned,
    predict,
    show,
    stages,
    steps,
    write,
)
from jaxmp.plan.choose import Candidate, Choice, Order, Probed
from jaxmp.plan.clock import PASSES, Clock
from jaxmp.plan.crossings import handover
from jaxmp.plan.predict import Line, Message, Times
from jaxmp.plan.seen import Seen, seen
from jaxmp.runtimes.schedule import Costs, size
from jaxmp.runtimes.schedules import SCHEDULES, named
from jaxmp.training.experiment import experiment_of
from jaxmp.training.parallel import actions_of
from tests.base import slow
from tests.runs import config_of, hurry_the_probe, known_model

EDGES = (0, 1), (1, 2), (2, 1), (1, 0)
LINK = Link(rate=8.0)  # a byte per microsecond


class Flat(nn.Module):
    """A dense layer over images."""

    features: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.features)(x.reshape(len(x), -1))


@pytest.mark.parametrize('name', ['gpipe', '1f1b', 'eager_1f1b', 'zb_h1', 'zb_h2', 'zb_h2(2, 1)'])
def test_equal_stages_take_the_time_of_the_schedule(name):
    """With messages that occupy no link the step is the end of the scheduler's own plan."""
    actions = named(name)(3, 4, Costs(2.0, 3.0, 1.0, 0.5))
    times = [Times(2.0, 4.0, (3.0, 1.0))] * 3
    seconds = predict.step(actions, times, dict.fromkeys(EDGES, Message(0.0, 0.0, 0.0)), 0.5)
    assert seconds == pytest.approx(size(actions)[2])


def test_a_step_by_hand():
    """Two micro-batches whose messages queue on the link forward; the slower stage is the last."""
    edges = {(0, 1): Message(0.5, 5.0, 0.25), (1, 0): Message(0.125, 1.0, 1.0)}
    times = [Times(1.0, 2.0, update=7.0), Times(3.0, 4.0)]
    # F0 ends at 1.5 and 3.0, its messages leave until 6.5 and 11.5, and arrive at 7.5 and 12.5.
    # GPipe: F1 7.5-10.75, 12.5-15.75; B1 until 19.875 and 24; its last message arrives at 26.
    seconds = predict.step(SCHEDULES['gpipe'](2, 2), times, edges, delay=1.0)
    assert seconds == 26.0 + 1.0 + 2.0 + 7.0


@pytest.mark.parametrize('text', ['fast', '100', '0mbit', '100mbit,50', '-1mbit', '5mbit,50ms,1'])
def test_a_link_that_is_none_is_refused(text):
    with pytest.raises(
        ValueError, match=rf'--link={text}: not a rate above 0.*--link=100mbit,50ms'
    ):
        parse(text)


RAW = Candidate('raw', 32.0, 0.0, 0.0, 0.0, 4e4)
SMALL = Candidate('small', 2.0, 0.08, 1e-3, 1e-3, 2.5e3)
CHEAP = Candidate('cheap', 8.0, 0.001, 1e-4, 1e-4, 1e4)
SLOW = Candidate('slow', 1.0, 0.001, 1.0, 1.0, 1e3)
WRONG = Candidate('wrong', 1.0, 0.5, 0.0, 0.0, 1e3)
ALL = RAW, SMALL, CHEAP, SLOW, WRONG


def probed(forward=1e-3, counts=(1, 2, 4), rows=ALL, halves=()):
    times = {n: [Times(forward / n, 2 * forward / n, halves)] * 3 for n in counts}
    return Probed(times, {e: list(rows) for e in EDGES})


def texts(choice):
    return [choice.codecs[e].text for e in sorted(choice.codecs)]


def test_each_crossing_takes_what_is_fastest_within_the_budget():
    """Of 40, 2 + 2.5, .2 + 10, 2,000 and 1 ms the second; with a smaller budget the third."""
    assert texts(choose.choose(probed(), LINK, 0.1)) == ['small'] * 4
    assert texts(choose.choose(probed(), LINK, 0.01)) == ['cheap'] * 4
    assert texts(choose.choose(probed(), LINK, 0.0)) == ['raw'] * 4
    given = probed()
    wrong = [c._replace(error=0.2) if c is SMALL else c for c in ALL]
    own = given._replace(crossings={**given.crossings, (1, 0): wrong})
    assert texts(choose.choose(own, LINK, 0.1)) == ['small', 'cheap', 'small', 'small']


def test_a_fast_link_needs_no_codec_and_a_hidden_message_none_with_an_error():
    fast = Link(rate=1e6)
    assert texts(choose.choose(probed(), fast, 0.1)) == ['raw'] * 4
    wide = probed(forward=10.0, counts=(8,), rows=(RAW, CHEAP._replace(encode=0.0, decode=0.0)))
    assert texts(choose.choose(wide, LINK, 0.1)) == ['raw'] * 4  # 10 of 10,000 ms, 3 times hidden


def test_of_steps_that_are_alike_the_least_error_is_taken():
    """Of 54 s, four exact messages may take .52 s more, not .56."""
    free = RAW._replace(text='free', error=0.01, nbytes=0.0)
    given = probed(forward=6.0, counts=(1,), rows=(free, free._replace(text='exact', error=0.0)))
    for cost, found in ((0.13, ['exact'] * 4), (0.14, ['exact'] * 3 + ['free'])):
        rows = [c._replace(encode=cost * (not c.error)) for c in given.crossings[0, 1]]
        choice = choose.choose(given._replace(crossings=dict.fromkeys(EDGES, rows)), LINK, 0.1)
        assert sorted(texts(choice)) == found
        assert choice.seconds == pytest.approx(54 + cost * found.count('exact'))


def test_the_order_is_the_least_of_all_predicted():
    """No other schedule, cap or number of micro-batches is faster; more halves, more to choose."""
    for halves in ((), (1e-3 / 4, 1e-3 / 4)):
        given = probed(rows=(CHEAP,), counts=(4,), halves=halves)
        choice = choose.choose(given, LINK, 0.1)
        found = {o: choose.predicted(given, LINK, choice.codecs, o) for o in choose.orders(given)}
        for name in ('zb_h1', 'zb_h2', 'zb_h2(2, 1)', 'zb_h2(3, 2)'):
            assert (Order(name, 4) in found) == bool(halves)
        assert any('(' in o.schedule for o in found)
        assert choice.seconds == found[choice.order] <= choose.ALIKE * min(found.values())
    delayed = Link(8.0, 200.0)  # so that every further message in a row costs
    assert choose.choose(probed(), LINK, 0.1).order.microbatches > 1
    given = probed(rows=(CHEAP._replace(nbytes=0.0),))
    assert choose.choose(given, delayed, 0.1).order.microbatches == 1  # as fast, and nothing kept


def test_codecs_that_were_not_chosen_are_shown_on_request():
    choice = choose.choose(probed(), LINK, 0.1)
    rows = [show.crossings(probed(), choice, LINK, 0.1, every).row_count for every in (False, True)]
    assert rows == [len(EDGES), len(EDGES) * len(ALL)]


def test_late_messages_do_not_make_the_chosen_schedule_slow(monkeypatch):
    """Free messages: 1F1B keeps least and is as fast, until they come a tenth of an action late."""
    free = CHEAP._replace(encode=0.0, decode=0.0, nbytes=0.0)
    edges = {(0, 1): [free], (1, 0): [free]}
    given = Probed({8: [Times(1.0, 2.0)] * 2}, edges)
    codecs = dict.fromkeys(edges, free)
    found = choose.ordered(given, LINK, codecs)
    monkeypatch.setattr(choose, 'LATE', 0.0)
    never = choose.ordered(given, LINK, codecs)
    assert never.order.schedule == '1f1b'
    assert found.seconds == never.seconds == 27.0
    late = [choose.predicted(given, LINK, codecs, c.order, 0.15) for c in (found, never)]
    assert late == pytest.approx([27.3, 28.2])


def test_what_hands_over_a_message_counts_per_message():
    """Of steps with equal bytes and no compute, that of 4 micro-batches takes 6 further ones."""
    given = probed(forward=1e-9, rows=(CHEAP._replace(encode=0.0, decode=0.0),))
    codecs, seconds = {e: given.crossings[e][0] for e in EDGES}, {}
    for count in (1, 4):
        order, slower = Order('gpipe', count), given._replace(handover=Line(0.1))
        seconds[count] = choose.predicted(slower, LINK, codecs, order)
        seconds[count] -= choose.predicted(given, LINK, codecs, order)
    assert seconds == pytest.approx({1: 4 * 0.1, 4: (4 + 3 + 3) * 0.1})


def test_a_message_holds_up_the_computing_of_both_ends():
    """Half of it each: of one micro-batch, whose 4 messages follow each other, all of it counts."""
    given, order = probed(), Order('gpipe', 1)
    codecs = {e: given.crossings[e][0] for e in EDGES}
    slower, same = (
        choose.predicted(p, LINK, codecs, order) for p in (given._replace(busy=Line(0.1)), given)
    )
    assert slower - same == pytest.approx(4 * 0.1)


def test_what_hands_over_a_message_counts_per_byte():
    """Equal bytes take as long in one message as in four, where a message by itself takes none."""
    given = probed(forward=1e-9, rows=(CHEAP._replace(encode=0.0, decode=0.0),))
    codecs = {e: given.crossings[e][0] for e in EDGES}
    slower = given._replace(handover=Line(0.0, 1e-3), busy=Line(0.0, 1e-3))
    order = Order('gpipe', 1)
    more, same = (choose.predicted(p, LINK, codecs, order) for p in (slower, given))
    assert more - same == pytest.approx(4 * 2 * 1e-3 * CHEAP.nbytes)


@pytest.mark.slow
def test_what_a_message_holds_up_is_measured():
    """A message takes time of its own, the larger the more, and some of the one device's."""
    for line in handover():
        assert 0 <= line.fixed < 1
        assert 0 <= line.a_byte < 1e-6


def test_the_plan_is_never_slower_than_a_uniform_choice():
    rng = np.random.default_rng(0)
    for _ in range(10):
        rows = [
            Candidate(t, 1.0, e, *(rng.uniform(0, 5e-3, 2)), rng.uniform(0, 4e4))
            for t, e in zip('abcd', [0.0, 0.01, 0.02, 0.03], strict=True)
        ]
        given, link = probed(rows=rows), Link(8.0, rng.uniform(0, 20))
        choice = choose.choose(given, link, 0.025)
        others = [choose.uniform(given, link, f, b) for f in 'abc' for b in 'abc']
        assert choice.seconds <= 1.02 * min(other.seconds for other in others)
        assert choice.error <= 0.025
        plain = choose.uniform(given, link, 'a', 'b', '1f1b')
        assert plain.order.schedule == '1f1b'
        assert choice.seconds <= 1.02 * plain.seconds


def test_nobody_meets_the_budget_and_it_says_so():
    given = probed(rows=(RAW, SMALL))
    choice = choose.choose(given, LINK, 0.01)
    said = show.open_because(given, choice, 0.01)
    assert said.startswith('every crossing stays raw: no other candidate meets --error=0.01, and')
    assert '0.08' in said
    assert show.open_because(given, choose.choose(given, LINK, 0.1), 0.1) == ''


@pytest.mark.parametrize('schedule', ['zb_h2(2, 3)', 'eager_1f1b(3)'])
def test_a_written_file_is_a_configuration(tmp_path, schedule, monkeypatch):
    """Its base is a file beside it."""
    (tmp_path / 'base.py').write_text(
        'from jaxmp.config import load\n\n\ndef get_config(name):\n    c = load("text_gpt2")\n'
        '    c.name = name\n    return c\n'
    )
    edges = {(a, b): RAW._replace(text=f'block({1 + 2 * a + b}, size=64)') for a, b in EDGES}
    order = Order(schedule, 4)
    monkeypatch.chdir(tmp_path)
    (out := tmp_path / 'own' / 'plan.py').parent.mkdir()
    changed = {'model.stages': 3, 'model.blocks': 3}
    out.write_text(write.text(Choice(order, edges, 1.0), 'base.py:mine', changed, out, 'Said.'))
    config = complete(files.load(str(out)))
    assert (config.name, config.fwd, config.bwd) == (
        'mine_plan',
        'block(2, size=64); block(5, size=64)',
        'block(3, size=64); block(6, size=64)',
    )
    assert (config.model.stages, config.parallel.runtime) == (3, 'mpmd')
    assert actions_of(config, 3) == choose.actions_of(order, 3)


@pytest.mark.parametrize(
    ('other', 'text'),
    [
        (Choice(Order('1f1b', 4), dict.fromkeys(EDGES, WRONG), 0.5), 'errs more than --error=0.1'),
        (Choice(Order('1f1b', 4), dict.fromkeys(EDGES, CHEAP), 0.995), 'by at most 1 %'),
        (Choice(Order('1f1b', 4), dict.fromkeys(EDGES, CHEAP), 1.5), ''),
    ],
)
def test_it_is_said_why_a_plan_is_not_the_fastest(other, text):
    plan = Choice(Order('1f1b', 4), dict.fromkeys(EDGES, RAW), 1.0)
    why = show.slower_because(plan, {('a', 'b'): other, ('c', 'd'): None}, 0.1)
    assert text in why
    assert bool(text) == bool(why)


def test_probe_plan_and_file(tmp_path, monkeypatch, capsys):
    """The whole command on a tiny network: errors fall with bits, and the file is a run."""
    known_model(monkeypatch, 'tiny', lambda classes, width: (Flat(24), Flat(classes)))
    monkeypatch.setattr(command, 'UNIFORM', (('raw', 'raw'), ('uniform(8)', 'uniform(8)')))
    hurry_the_probe(monkeypatch)
    out = tmp_path / 'plan.py'
    command.main(
        ['--config.model.name=tiny', '--config.batch_size=16', '--link=0.1mbit,5ms', '--seconds=9',
         f'--out={out}', '--codecs=uniform(2)', '--error=0.001', '--candidates']
    )  # fmt: skip
    shown, told = capsys.readouterr()
    errors = dict(re.findall(r'forward +│ (\S+) +│ +\S+ │ +(\S+) │', shown))
    assert float(errors['raw']) == 0.0
    assert 0 < float(errors['uniform(8)']) < 1e-3 < float(errors['uniform(2)'])
    assert float(errors['uniform(8)']) < float(errors['ef21(uniform(4))'])
    assert len(re.findall('chosen', shown)) == 2
    assert re.search(r'the plan +│ .* micro-batches +│ +[\d.]+ │ +\S+ │', shown)
    assert told.count('training steps') == 2
    assert shown.startswith('It does not pay: alone a step takes ')
    assert 'nan' not in shown
    run = f'jaxmp launch --processes 2 -- jaxmp train --config={out}'
    run += ' (all on this machine; on several: docs/running.md)'
    slower = 'One machine alone is faster; to run it all the same'
    assert shown.endswith(f'wrote {out}. {slower}: {run}\n')
    config = complete(files.load(str(out)))
    assert (config.fwd, config.name) == ('uniform(8)', 'tiny_plan')
    exp = experiment_of(config)
    assert [str(c.fwd) for c in exp.model.boundaries] == ['uniform(8)']


class Sink(nn.Module):
    """An image as a text of 64 tokens, of which the first has a thousand times the others' norm."""

    @nn.compact
    def __call__(self, x, train=False):
        y = nn.Dense(16)(x.reshape(len(x), -1, 1))
        return jnp.concatenate([1000 * (1 + jnp.abs(y[:, :1])), y[:, 1:]], 1)


@pytest.mark.slow
def test_a_probe_that_sees_a_sink_proposes_no_word_with_one_scale(tmp_path, monkeypatch, capsys):
    """The whole command: other candidates forward than backward, where no gradient has a sink."""
    known_model(monkeypatch, 'sink', lambda classes, width: (Sink(), Flat(classes)))
    monkeypatch.setattr(candidates, 'COMPONENTS', ())
    monkeypatch.setattr(candidates, 'APART', ('outliers(lloyd(4))', 'nvfp4', 'mx(8)'))
    monkeypatch.setattr(candidates, 'ALIKE', ('uniform(8)', 'lloyd(4)', 'fp16'))
    monkeypatch.setattr(command, 'UNIFORM', (('raw', 'raw'), ('uniform(8)', 'uniform(8)')))
    monkeypatch.setattr(steps, 'STEPS', 2)
    monkeypatch.setattr(stages, 'MOST', 2)
    monkeypatch.setattr(planned, 'EACH', 1)
    out = tmp_path / 'plan.py'
    command.main(
        ['--config.model.name=sink', '--config.batch_size=16', '--link=1mbit,5ms', '--seconds=9',
         '--config.optimizer.lr=1e-9', '--candidates', f'--out={out}']
    )  # fmt: skip
    shown, told = capsys.readouterr()
    ways = {way: set(re.findall(rf'{way} +│ (\S+) +│', shown)) for way in ('forward', 'backward')}
    assert ways == {
        'forward': {'raw', 'outliers(lloyd(4))', 'nvfp4', 'mx(8)'},
        'backward': {'raw', 'uniform(8)', 'lloyd(4)', 'fp16'},
    }
    assert re.search(r'from stage 0 to 1: the heaviest token has \d{3,}\.\d times the norm', told)
    assert complete(files.load(str(out))).fwd in ways['forward']


def test_what_is_seen_of_a_pretrained_model_and_of_others():
    """Of a pretrained model's gradients and of random numbers no token is heavy."""
    with np.load(sinks.SAMPLE) as data:
        sample = {name: seen(data[name]) for name in data if data[name].ndim}
    assert sample['act_15'].has_sink
    assert {n for n, s in sample.items() if s.has_sink} <= {
        n for n in sample if n.startswith('act')
    }
    x = np.random.default_rng(0).normal(size=(4, 64, 48))
    for heavy in (seen(x).has_sink, seen(x).has_heavy_channel, seen(x).falls):
        assert not heavy
    wide = np.random.default_rng(0).normal(size=(4, 64, 192)) * np.where(np.arange(192) == 5, 99, 1)
    assert seen(wide).has_heavy_channel
    assert not seen(wide).has_sink
    mixed = x[..., :8] @ np.random.default_rng(1).normal(size=(8, 48))
    assert seen(mixed).falls
    assert seen(np.zeros((2, 3))) == Seen(1.0, 0.0, 1 / 3)


HEAVY = {'token': 140.0}, {'channel': 13.0}


@pytest.mark.parametrize(
    ('heavy', 'falls'),
    slow([*itertools.product(HEAVY, (False, True))], lambda c: 'token' not in c[0] or c[1]),
)
def test_no_candidate_breaks_where_something_is_heavy(heavy, falls):
    """The error of the median token, and of the worst, on activations of a pretrained model."""
    what = Seen(**{'token': 1.0, 'channel': 1.0, 'components': 0.3 if falls else 0.9, **heavy})
    texts = candidates.texts_for(what)
    assert any('klt' in text for text in texts) == falls
    for text in texts:
        found = sinks.errors(spec.parse(text).codec)
        assert not found.breaks, text
        assert found.median < 0.5, text
    plain = candidates.texts_for(Seen(1.0, 1.0, 0.9))
    assert plain[:3] == ('raw', 'uniform(8)', 'uniform(4)')
    assert any(sinks.errors(spec.parse(text).codec).breaks for text in plain)


def test_an_error_is_weighed_by_the_gradient_that_came_back():
    """Half of the channels move the loss; white noise counts as its relative squared error."""
    x = jax.random.normal(jax.random.key(0), (4, 64, 32))
    g = jnp.ones((4, 64, 32)).at[..., :16].set(0.01)
    noise = 0.1 * jax.random.normal(jax.random.key(1), x.shape)
    assert loss.weighed([x], {0: x + noise}, [g]) == pytest.approx(0.01, rel=0.1)
    small, large = noise.at[..., 16:].set(0), noise.at[..., :16].set(0)
    found = [loss.weighed([x], {0: x + e}, [g]) for e in (small, large)]
    assert found[0] < 0.001 * found[1]
    sink = x.at[:, 0].set(1000.0)  # its energy is not what an error is compared with
    assert loss.weighed([sink], {0: sink + noise}, [g]) == pytest.approx(0.01, rel=0.2)
    assert loss.weighed([x], {0: x * jnp.nan}, [g]) == math.inf


def test_activations_stay_within_a_percent_of_perplexity():
    """All boundaries together; what came back is as it was."""
    row = lambda text, bits, *nats: [RAW._replace(text=text, bits=bits, nats=n) for n in nats]
    words = row('raw', 32, 0, 0), row('fine', 8, 1e-4, 2e-4), row('good', 5, 2e-3, 6e-3)
    words = *words, row('coarse', 3, 9e-3, 4e-2), row('even', 4, 4e-3, 1e-4)
    edges = [(0, 1), (1, 2)]
    given = {e: [w[i] for w in words] for i, e in enumerate(edges)} | {(1, 0): [SMALL], (2, 1): []}
    texts = lambda percent: [[c.text for c in loss.within(given, percent)[e]] for e in edges]
    assert texts(1.0) == [['raw', 'fine', 'good', 'coarse', 'even'], ['raw', 'fine', 'even']]
    given = {e: rows[:-1] for e, rows in given.items() if rows} | {(1, 0): [SMALL]}
    assert texts(1.0) == [['raw', 'fine', 'good'], ['raw', 'fine', 'good']]
    assert texts(0.1) == [['raw', 'fine']] * 2
    assert texts(0.0) == [['raw']] * 2
    assert loss.within(given, 0.0)[1, 0] == [SMALL]


def test_what_follows_the_gradients_is_timed_without_them():
    """The rest of the runtime is as it was."""

    class Slow:
        last = 1

        def value_and_grad(self, x):
            time.sleep(0.05)
            return x

    start, via = time.monotonic(), steps.Gradients(Slow())
    assert (via.value_and_grad(3), via.last) == (3, 1)
    assert 0.05 <= via.seconds <= via.end - start
    assert start + 0.05 <= via.end <= time.monotonic()


def test_a_plan_of_an_own_model_starts_from_plain_defaults():
    link = '--link=1mbit,5ms'
    read = lambda *words: command.asked([link, *words], 'jaxmp plan', '', 'plan.py')
    assert read().base == 'digits_resnet'
    own = read('--config.model.name=own.py:network')
    assert (own.base, own.changes) == ('common', ['model.name=own.py:network'])


def test_stages_take_what_a_step_of_training_took(monkeypatch):
    """Not less than alone, where a step runs several of them at once."""
    alone = [[1.0, 2.0], [1.0, 2.0]]
    monkeypatch.setattr(stages, 'passes', lambda *_: lambda split: alone)
    monkeypatch.setattr(stages, 'MOST', 1)
    config = config_of('digits_resnet')
    config.parallel.num_microbatches = 1
    exp = experiment_of(config)
    clock = Clock(0.0, 0.0, lambda text: None)
    for gradients, forward, backward in (12.0, 2.0, 4.0), (3.0, 1.0, 2.0):
        trained = steps.Trained({}, [None, None], gradients, 0.5)
        assert stages.stage_times(exp, trained, clock) == {
            1: [Times(forward, backward, (), 0.5)] * 2
        }
    halves = lambda split: [[1.0, 1.5, 1.0]] * 2 if split else alone
    monkeypatch.setattr(stages, 'passes', lambda *_: halves)
    trained = steps.Trained({}, [None, None], 12.0, 0.5)
    clock = clock._replace(seconds=math.inf)
    want = {1: [Times(2.0, 4.0, (3.0, 2.0), 0.5)] * 2}
    assert stages.stage_times(exp, trained, clock) == want


def test_few_numbers_of_micro_batches_lie_beyond_those_measured_first(monkeypatch):
    """The time of the probe may end after any of them."""
    told = []
    monkeypatch.setattr(stages, 'passes', lambda *_: lambda split: [[1.0, 2.0]] * 2)
    exp = stages.with_microbatches(experiment_of(config_of('text_gpt2')), 8)
    exp.config.batch_size = 32
    clock = Clock(math.inf, 0.0, told.append)
    stages.stage_times(exp, steps.Trained({}, [None] * 4, 1.0, 0.5), clock)
    found = [int(n) for n in re.findall(r'stages with (\d+)', ' '.join(told))]
    assert found == [8, 16, 4, 2, 1]


def test_what_is_timed_takes_turns():
    """A machine that becomes slower in the midst does so for all; the medians count."""
    seen, seconds = [], iter([1.0, 10.0, 1.0, 10.0, 3.0, 30.0, 3.0, 30.0, 3.0, 30.0])

    def run(name):
        return lambda split: seen.append((name, split)) or [[next(seconds), 5.0]]

    clock = Clock(0.0, 0.0, lambda text: None)
    found = stages.in_turns({(8, False): run('whole'), (8, True): run('split')}, clock)
    assert seen == [('whole', False), ('split', True)] * PASSES
    assert {k: v.tolist() for k, v in found.items()} == {
        (8, False): [[3.0, 5.0]],
        (8, True): [[30.0, 5.0]],
    }


def test_a_probe_has_some_micro_batches_for_each_stage():
    """Four, or as many as are configured; a number that divides the batch."""
    config = config_of('text_gpt2')
    for batch, stages_, configured, found in ((32, 2, 1, 8), (36, 2, 1, 9), (64, 2, 32, 32)):
        config.update(batch_size=batch)
        config.model.update(stages=stages_)
        config.parallel.update(num_microbatches=configured)
        assert planned.probed_experiment(config).config.parallel.num_microbatches == found


BAD = {
    'a model without boundaries': (['--config.model.name=tiny'], 'has one stage, so there is no'),
    'no channel': (['--codecs=topk(1)'], r'unknown word .topk. \(did you mean top_k'),
    'a state per example': (['--codecs=aqsgd(raw, examples=examples)'], 'a state per example'),
    'positions of another message': (['--codecs=same_support()'], 'does not stand by itself'),
    'of two directions': (['--codecs=klt(2, by_gradient=0.3)'], 'give it without by_gradient'),
    'no stage': (['--config.model.name=gpt2', '--config.model.stages=0'], 'stages'),
    'no model': (['--config.model.name=nosuch'], 'nosuch'),
    'no key': (['--config.widht=3'], r'no key .widht. \(did you mean'),
    'no number': (['--error=-1'], '--error is a number from 0'),
    'no flag': (['--colour=3'], r'unexpected .--colour=3.; keys are written --config\.key=value'),
    'no file': (['--config=nowhere.py'], 'no such Python file'),
}


@pytest.mark.parametrize('case', BAD)
def test_a_mistake_is_one_line(case, capsys, monkeypatch):
    known_model(monkeypatch, 'tiny', lambda classes, width: (Flat(classes),))
    words, message = BAD[case]
    with pytest.raises(SystemExit) as ended:
        command.main(['--link=1gbit', *words])
    said = capsys.readouterr().err + str(ended.value.code)
    assert re.search(message, said), said


def test_channels_per_boundary(monkeypatch):
    config = config_of('text_gpt2')
    config.update(fwd='raw; uniform(4);top_k(0.1)', bwd='uniform(8)')
    cuts = experiment_of(config).model.boundaries
    assert [str(c.fwd) for c in cuts] == ['raw', 'uniform(4)', 'top_k(0.1)']
    assert [str(c.bwd) for c in cuts] == ['uniform(8)'] * 3
    config.fwd = 'raw; raw'
    with pytest.raises(ValueError, match='2 channels and the model 3 boundaries; give one for all'):
        experiment_of(config)
