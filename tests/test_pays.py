"""Whether further machines pay: verdicts of made-up numbers, and the command on a model."""

import json

import pytest

from jaxmp.net.speed import Link
from jaxmp.plan import pays
from jaxmp.plan import verdict as verdicts
from jaxmp.plan.choose import Candidate, Choice, Order
from tests.runs import hurry_the_probe

EDGES = (0, 1), (1, 0)


def choice(seconds, *texts):
    codecs = {e: Candidate(t, 4.0, 0.0, 0.0, 0.0, 1.0) for e, t in zip(EDGES, texts, strict=True)}
    return Choice(Order('1f1b', 4), codecs, seconds)


def verdict(raw, best, delay=0.0, still=None, needs=1, texts=('block(4)', 'block(4)')):
    """Steps over 1, 10 and 100 Mbit/s, of which the second is asked about; alone takes 2 s."""
    rows = [
        verdicts.Row(Link(rate, delay), r, choice(b, *(texts if b < r else ('raw', 'raw'))))
        for rate, r, b in zip((1, 10, 100), raw, best, strict=True)
    ]
    quiet = rows[1]._replace(choice=rows[1].choice._replace(seconds=still or rows[1].best))
    return verdicts.Verdict(2, 2.0, needs << 30, 8 << 30, rows[1], quiet, rows)


@pytest.mark.parametrize(
    ('v', 'text', 'following'),
    [
        (
            verdict((20, 7.4, 1.5), (4.0, 1.64, 1.5), 40.0, 1.14),
            'It pays: alone a step takes 2 s, on 2 machines over 10 Mbit/s with 40 ms one way 3.70 '
            'times as long with raw messages and 0.82 times with block(4). It pays above 8.6 '
            'Mbit/s, raw above 97 Mbit/s. Without the delay it would be 0.57 times.',
            'Next: `jaxmp plan` with the same flags writes the run.',
        ),
        (
            verdict((20, 7.4, 3.0), (4.0, 3.6, 3.0)),
            'It does not pay: alone a step takes 2 s, on 2 machines over 10 Mbit/s 3.70 times as '
            'long with raw messages and 1.80 times with block(4). It pays at no rate up to 100 '
            'Mbit/s: the link is not what limits it.',
            'Next: train on one machine; replicas that average rarely (`exchange=diloco(...)`) '
            'send less.',
        ),
        (
            verdict((20, 7.4, 3.0), (4.0, 3.6, 3.0), 40.0, 1.5),
            'It does not pay: alone a step takes 2 s, on 2 machines over 10 Mbit/s with 40 ms one '
            'way 3.70 times as long with raw messages and 1.80 times with block(4). It pays at no '
            'rate up to 100 Mbit/s. Without the delay it would be 0.75 times.',
            'Next: train on one machine, or hide the latency by replicas that average rarely '
            '(`exchange=diloco(...)`).',
        ),
        (
            verdict((20, 2.0, 1.5), (20, 2.0, 1.5)),
            'It hardly makes a difference: alone a step takes 2 s, on 2 machines over 10 Mbit/s '
            '1.00 times as long with raw messages. It pays above 25 Mbit/s, raw above 25 Mbit/s.',
            'Next: train on one machine, or join them by a link of more than 25 Mbit/s; `jaxmp '
            'plan` with the same flags writes the run.',
        ),
        (
            verdict((20, 2.0, 1.5), (20, 2.0, 1.5), needs=9),
            'The model does not fit alone: it needs at least 9.0 GiB, this machine has 8.0 GiB. If '
            'it did, alone a step takes 2 s, on 2 machines over 10 Mbit/s 1.00 times as long with '
            'raw messages. It pays above 25 Mbit/s, raw above 25 Mbit/s.',
            'Next: `jaxmp plan` with the same flags writes the run.',
        ),
        (
            verdict((4, 2.4, 1.5), (1.6, 1.5, 1.5), texts=('mx(4)', 'nvfp4')),
            'It pays: alone a step takes 2 s, on 2 machines over 10 Mbit/s 1.20 times as long with '
            'raw messages and 0.75 times with mx(4) forward and nvfp4 backward. It pays above 1 '
            'Mbit/s, raw above 83 Mbit/s.',
            'Next: `jaxmp plan` with the same flags writes the run.',
        ),
    ],
    ids=['pays', 'never', 'delay', 'no difference', 'does not fit', 'always'],
)
def test_a_verdict_says_what_to_do(v, text, following):
    assert verdicts.said(v) == text
    assert verdicts.following(v) == following
    assert verdicts.running(v).startswith('Next') == ('It does not pay' not in text)
    assert pays.record(v)['rows'][1]['raw'] == v.row.raw


def test_steps_that_vary_say_that_other_work_runs():
    v = verdict((4.0, 2.4, 1.0), (4.0, 2.4, 1.0))
    assert verdicts.unsteady(v) == verdicts.unsteady(v._replace(steps=[1.9, 2.0, 2.3])) == ''
    text = verdicts.unsteady(v._replace(steps=[2.0, 1.0, 1.2]))
    assert text.startswith('Steps alone took 1 s to 2 s: other work seems to run here')


def test_late_gradients_are_told_before_what_to_do(capsys):
    v = verdict((20, 7.4, 3.0), (4.0, 3.6, 3.0))
    for late in ('Late gradients are meant.', ''):
        pays.show(v._replace(late=late))
        *_, before, after = capsys.readouterr().out.split('Next: ')[0].split('\n')
        assert (before == late) == bool(late)
        assert after == ''


def test_the_command_tells_the_verdict_first(tmp_path, monkeypatch, capsys):
    """Of the digits over a link of 1 kbit/s, which never pays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pays, 'RATES', (1, 1000))
    hurry_the_probe(monkeypatch)
    pays.main([
        '--config=digits_resnet', '--link=1kbit', '--seconds=1', '--config.model.width=2',
        '--config.model.name=tests.tiny_stages:build', '--config.batch_size=8',
        '--config.parallel.num_microbatches=2',
    ])  # fmt: skip
    shown = ' '.join(capsys.readouterr().out.split())
    assert shown.startswith('It does not pay: alone a step takes ')
    assert 'Next: train on one machine' in shown
    saved = json.loads((tmp_path / 'pays.json').read_text())
    assert [row['rate'] for row in saved['rows']] == [0.001, 1, 1000]
    first, *_, last = saved['rows']
    assert first['raw'] > first['best'] > 100 * saved['alone'] > 0
    assert first['raw'] > 10 * last['raw']
    assert saved['machines'] == 3
    assert (tmp_path / 'pays.png').stat().st_size > 5000


def test_a_link_is_needed(capsys):
    with pytest.raises(SystemExit):
        pays.main(['--config=digits_resnet'])
    assert '--link' in capsys.readouterr().err
