"""The study's bench: the event model at published runs, the twin from start to table, refusals."""

import json
import re

import pytest

from jaxmp.net.speed import parse
from jaxmp.pictures import style
from jaxmp.plan.choose import Order
from jaxmp.sweep import runner
from study.bench import command, picture, protocol, twin
from study.bench.cost import Cost, cost
from study.bench.entries import DEFAULT, PAIRS, RAW, TARGETS, TRIPLES, Entry, entries_of
from study.bench.protocol import DENSE, LINK, RECORDS, Way
from study.bench.rows import ranked, record, row_of
from study.bench.table import markdown
from study.bench.twin import Twin
from tests.base import ROOT

TINY = {  # two stages that compile at once, five steps
    'model.name': 'tests.tiny_study:build', 'model.stages': 4, 'model.blocks': 4,
    'data.name': 'digits', 'data.sequence_length': 128, 'data.train_examples': 20,
    'data.test_examples': 4, 'batch_size': 4, 'epochs': 1,
}  # fmt: skip
OURS = Entry('uniform(4)', 'uniform(8)')
LOSSES = 2.2, 2.0, 1.9, 1.86, 1.82, 1.756  # of the page's table; the last is that of no compression


@pytest.mark.parametrize('record', RECORDS, ids=lambda r: r.name)
def test_the_event_model_reproduces_a_published_run(record):
    """Nothing is fitted: computing is that of the record's run without links."""
    order = Order('1f1b', record.microbatches)
    made = protocol.step(parse(LINK), (record.way, record.way), order, record.computing)
    assert made == pytest.approx(record.seconds, rel=0.02)


def test_messages_of_both_directions_share_the_wire_of_their_receiver():
    """An inner stage takes two messages per micro-batch; with one wire they follow each other."""
    way, m = Way(1e9), 16
    made = protocol.step(parse('1gbit'), (way, way), Order('1f1b', m), computing=1e-9)
    each = 8 / m
    assert made >= 2 * m * each
    assert made == pytest.approx((2 * m + 14) * each, rel=0.1)  # and the hops there and back


def test_a_codec_of_no_time_and_no_more_steps_gains_what_its_bits_gain():
    raw, half = (Cost(bits, None, 0.0, 0.0) for bits in (16.0, 8.0))
    same = Twin([1.0], [2.0], [2.0])
    times = {c: row_of(RAW, (c, c), same, '').seconds(LINK) for c in (raw, half)}
    assert times[raw] == pytest.approx(DENSE.steps * DENSE.seconds, rel=0.02)
    assert 1.8 < times[raw] / times[half] < 2
    slow = row_of(RAW, (half, half), Twin([1.5, 2.5], [2.0] * 2, [2.0] * 2), '')
    assert slow.seconds(LINK) == pytest.approx(2 * times[half])
    assert row_of(RAW, (half, half), Twin([1.5, None], [2.0] * 2, [2.0] * 2), '').ratio is None


def run_of(entry, seed, *losses):
    history = {'on': {'loss': list(losses)}}
    text = {'fwd': entry.fwd, 'bwd': entry.bwd, 'config': {'codecs': entry.codecs}}
    return {**text, 'seed': seed, 'steps': 10 * len(losses), 'history': history}


def test_steps_are_compared_with_the_run_of_the_same_seed():
    """A seed without an uncompressed run does not count; one that never gets there has no ratio."""
    runs = [run_of(RAW, 0, 4.0, 2.0, 1.0), run_of(RAW, 1, 4.0, 3.0, 2.0)]
    runs += [run_of(OURS, 0, 5.0, 3.0, 2.0), run_of(OURS, 1, 5.0, 4.0, 3.5), run_of(OURS, 2, 1.0)]
    found = twin.twins(runs, loss=2.0)
    assert found[RAW].ratios == [1.0, 1.0]
    assert found[OURS] == Twin([1.5, None], [2.0, 3.5], [1.0, 2.0])
    assert found[OURS].ratio is None


def test_the_committed_table_is_that_of_the_committed_runs():
    """Nothing is measured: the folder has the costs of every entry, and the page its picture."""
    folder = ROOT / 'results' / 'bench'
    before = sorted(p.name for p in (folder / 'costs').iterdir())
    rows = command.rows_in(folder, twin.GOAL.loss)
    assert sorted(p.name for p in (folder / 'costs').iterdir()) == before
    assert {r.entry for r in rows} == {*DEFAULT}
    saved = json.loads((folder / 'table.json').read_text())
    # Python 3.12 adds floats with a smaller error.
    digits = lambda text: json.loads(text, parse_float=lambda x: float(f'{float(x):.12g}'))
    made = json.dumps([record(r) for r in ranked(rows, LINK)])
    assert digits(json.dumps(saved['rows'])) == digits(made)
    text = markdown(rows, LINK, twin.GOAL.loss, saved)
    assert text == (folder / 'table.md').read_text()
    for end in ('png', 'svg'):
        assert (folder / f'time.{end}').read_bytes() == (
            ROOT / f'docs/bench_time.{end}'
        ).read_bytes()


def test_the_page_of_the_table_says_what_it_says():
    rows = command.rows_in(ROOT / 'results' / 'bench', twin.GOAL.loss)
    there = [r for r in rows if r.ratio is not None and r.bits < 8]
    best, *others = ranked(there, LINK)
    assert best.entry == Entry(TRIPLES, TARGETS)
    assert [r.entry for r in others] == [Entry(PAIRS, TARGETS), Entry(PAIRS, 'rotate(trellis(2))')]
    assert all(len(r.twin.losses) == 3 for r in rows)
    page = ' '.join((ROOT / 'docs' / 'bench.md').read_text().split())
    results = [json.loads(p.read_text()) for p in (ROOT / 'results/bench/runs').glob('*.json')]
    found = {loss: twin.twins(results, loss)[best.entry].ratio for loss in LOSSES}
    said = [f'{ratio:.2f}' if ratio else 'never' for ratio in found.values()]
    assert f'those without compression | {" | ".join(said)} |' in page
    dense, subspace = (f'{r.seconds * r.steps:,.0f}' for r in RECORDS)
    assert f'public records of November 2026 ({dense} and {subspace} s in all)' in page
    raw = next(r for r in rows if r.entry == RAW).twin.raw
    assert round(sum(raw) / len(raw), 3) == LOSSES[-1]
    assert not re.search(r'less than a third|53,490', page + (ROOT / 'README.md').read_text())
    assert sorted(round(r, 2) for r in best.twin.ratios) == [1.07, 1.1, 1.13]
    assert [round(r.ratio, 2) for r in (best, *others)] == [1.1, 1.25, 1.38]


def test_an_entry_that_never_reaches_the_loss_is_drawn_at_no_time():
    """It stands above the axis of times, where the label says never."""
    rows = command.rows_in(ROOT / 'results' / 'bench', twin.GOAL.loss)
    with style.style():
        figure = style.figure(11, 6)
        picture.paint(figure, rows, LINK)
    axes = figure.axes[0]
    never = [line for line in axes.lines if line.get_marker() == 'x']
    [top] = {line.get_ydata()[0] for line in never}
    assert len(never) == sum(r.ratio is None for r in rows) == 14
    times = [r.seconds(LINK) for r in rows if r.ratio is not None]
    assert sorted(l.get_ydata()[0] for l in axes.lines if l.get_marker() == 'o') == sorted(times)
    assert top > max(times)
    ticks = {
        t.get_text(): y for t, y in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
    }
    assert ticks['never'] == top
    assert max(y for text, y in ticks.items() if text != 'never') < top


def test_entries_are_named_apart_and_read_their_own_words():
    assert len({e.name for e in DEFAULT}) == len(DEFAULT)
    assert entries_of(['block(4)', 'block(4)'], '') == [RAW, Entry('block(4)', 'block(4)')]
    assert entries_of(['a(2)'], 'b.py:c')[1] == Entry('a(2)', 'c', 'b.py')


def test_a_cost_is_of_the_channel(tmp_path):
    """Bits are those of bfloat16; words of an own file have their own."""
    made = cost('raw', shape=(2, 8))
    assert (made.bits, made.gap) == (16.0, None)
    file = tmp_path / 'mine.py'
    file.write_text(
        'import jaxmp\n\n\ndef mine(bits: int) -> jaxmp.Codec:\n    return jaxmp.uniform(bits)\n'
    )
    assert cost('mine(3)', str(file), (2, 8)).bits == pytest.approx(3, abs=0.01)
    with pytest.raises(ValueError, match=r'same_support.* does not stand by itself at a boundary'):
        cost('same_support()')


@pytest.mark.slow
def test_the_table_of_two_entries_goes_on_after_an_interruption(tmp_path, monkeypatch, capsys):
    """Two stages, five steps; a run that has ended, and a cost, are kept and not made again."""
    real, ran = runner.one, []

    def one(job, *rest):
        ran.append(job.result.stem)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return real(job, *rest)

    monkeypatch.setattr(runner, 'one', one)
    with pytest.raises(KeyboardInterrupt):
        command.bench([RAW, OURS], tmp_path, 1, goal=twin.Goal(99.0, TINY))
    kept = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.json') if 'work' not in p.parts}
    assert len(kept) == 4  # a run, three channels
    table = command.bench([RAW, OURS], tmp_path, 1, goal=twin.Goal(99.0, TINY))
    assert ran == ['raw-s0', *['uniform_4-uniform_8-s0'] * 2]
    assert kept == {p: p.stat().st_mtime_ns for p in kept}
    assert '`uniform(4)`; `uniform(8)` | paper, fw4-bw8 | 4.00 / 8.00 |' in table
    assert (tmp_path / 'table.md').read_text() == table
    saved = json.loads((tmp_path / 'table.json').read_text())
    rows = {row['fwd']: row for row in saved['rows']}
    assert rows['raw']['ratio'] == 1.0
    assert rows['raw']['seconds'][LINK] == pytest.approx(DENSE.steps * DENSE.seconds, rel=0.02)
    assert saved['versions']
    assert (tmp_path / 'time.png').read_bytes().startswith(b'\x89PNG')
    assert '1 to do' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['topk(0.1)'], 'topk'),
        (['fp16', '--backward', 'anchored(fp16, vocabulary)'], 'anchored is for activations'),
        (['nowhere.py:mine(2)'], "cannot import 'nowhere.py'"),
    ],
)
def test_a_bad_text_is_refused_before_any_run(words, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        command.main([*words, '--out', str(tmp_path)])
    assert not list(tmp_path.iterdir())
