"""What the benches' scripts say of their own bars, without measuring anything."""

import contextlib
import importlib
import json
import os
import re
import shutil
import sys

import jax
import pytest

from jaxmp.config import load
from jaxmp.runtimes.schedules import gpipe, named
from jaxmp.training.evaluation.language_model import open_language_model
from study import polar
from tests.base import ROOT

RESULTS = ROOT / 'bench' / 'results'


def rows_of(kind, day=21):
    lines = (RESULTS / f'epyc_2026-11-{day}_{kind}.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def bench(monkeypatch):
    """Imports a script of bench/, which imports its neighbours; on as many cores as before."""
    monkeypatch.syspath_prepend(str(ROOT / 'bench'))
    monkeypatch.setattr(os, 'sched_setaffinity', lambda *_: None)
    return importlib.import_module


def test_a_loss_comes_as_much_sooner_as_steps_are_faster(bench):
    """Where losses are alike step by step; what compiles before the first test does not count."""
    late_time = bench('late_time')

    def run(order, seconds, losses):
        times = [100 + seconds * step for step in (10, 20, 30)]
        train = [{'kind': 'train', 'step': 10 * i, 'seconds': t} for i, t in enumerate(times, 1)]
        test = [
            {'kind': 'test', 'compression': 'on', 'step': 10 * i, 'loss': loss}
            for i, loss in enumerate(losses, 1)
        ]
        points = late_time.curve([*train, *test])
        return {'kind': 'time', 'link': 'a', 'order': order, 'curve': points, 'load': [0.0]}

    waits, same = (run(*about, [3, 2, 1]) for about in (('eager_1f1b', 2), ('1 late', 0.5)))
    assert waits['curve'] == [(10, 20, 3), (20, 40, 2), (30, 60, 1)]
    assert late_time.compared(same, waits) == (1, 30, 15, 4)
    worse = run('3 late', 0.5, [3, 2.5, 1.5])
    assert late_time.compared(worse, waits) == (1.5, 30, 15, 50 / 15)
    assert late_time.reached(waits['curve'], 3.5) == (10, 20)
    about = dict.fromkeys(('task', 'hardware', 'commit', 'fwd', 'bwd', 'command'), 'a')
    about['versions'] = {'jax': 'j'}
    assert '| a | 3 late | 0.500 | 1.5000 | 1.5000 | 30 | 15.0 | 3.33 |' in late_time.table(
        [about | {'kind': 'run'}, waits, same, worse]
    )


def test_a_table_with_missed_bars_is_the_exit_status(bench, monkeypatch, tmp_path):
    """The committed rows, measured again by nobody: the bars of the ResNet are missed."""
    slow = bench('slow_network')
    shutil.copy(RESULTS / 'epyc_2026-11-21_network.jsonl', tmp_path / 'rows.jsonl')
    nothing = lambda *_: contextlib.nullcontext()
    for module, name, new in (
        (slow.emulated_network, 'obstacle', lambda: None),
        (slow.emulated_network, 'lab', nothing),
        (slow, 'workers', nothing),
        (slow, 'work', lambda *_: None),
        (slow.slow_report, 'draw', lambda *_: None),
    ):
        monkeypatch.setattr(module, name, new)
    monkeypatch.setattr(sys, 'argv', ['slow_network.py', '--out', str(tmp_path / 'rows')])
    with pytest.raises(SystemExit) as ended:
        slow.main()
    assert ended.value.code == 1
    text = (tmp_path / 'rows.md').read_text()
    assert '* FAIL: resnet, 1g' in text
    assert 'Made on a machine that did nothing else' in text


def test_no_bar_is_met_by_windows_that_do_not_agree(bench):
    """Without a limit raw was not steady, so no codec's cost there is known."""
    rows = rows_of('network')
    said = list(bench('slow_report').bars(bench('slow_report').Results(rows)))
    assert not [s for s in said if s.startswith('* pass: mlp, none')]
    assert [s for s in said if s.startswith('* pass: resnet, none')]


@pytest.mark.parametrize(('memcpy', 'status'), [(1.0, 0), (0.01, 1)])
def test_selection_ends_with_its_bars(bench, monkeypatch, memcpy, status):
    seconds = {'memcpy': memcpy, 'dense TopK': 8.0, 'lax.top_k dense': 160.0}
    seconds |= {'encode': 6e-3, 'decode': 4e-3}
    selection = bench('selection')
    monkeypatch.setattr(selection, 'measure', lambda n, repeats: seconds)
    monkeypatch.setattr(selection, 'keep_freed_pages', lambda: None)
    with pytest.raises(SystemExit) as ended:
        selection.main(1)
    assert ended.value.code == status


@pytest.mark.parametrize(('mean', 'status'), [(0.12, 0), (0.13, 1)])
def test_the_polar_report_ends_with_its_bars(monkeypatch, tmp_path, mean, status):
    row = {'kind': 'distortion', 'size': 1024, 'rate': 0.5, 'search': 'argmax', 'bound': 0.11}
    row |= {'construction': 'genie', 'mean': mean, 'error': 1e-4, 'blocks': 400}
    (tmp_path / 'rows.jsonl').write_text(json.dumps(row))
    monkeypatch.setattr(polar, 'draw', lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        polar.main([str(tmp_path / 'rows.jsonl'), '--out', str(tmp_path / 'page')])
    assert ended.value.code == status


def test_the_thesis_has_another_polar_code():
    """Each of its cells is within four standard errors, and all together are not (chi-square)."""
    rows = rows_of('polar')
    text = '\n'.join(polar.markdown(rows))
    assert 'cells 73.5, p = 5e-08: theirs is another code than ours' in text


def test_the_loss_of_an_exchange_counts_all_its_steps(bench, tmp_path):
    """Two that compile, and those of the links before: 34 over the second link, not 16."""
    slow = bench('slow_exchange')
    rows = slow.Rows(tmp_path / 'rows.jsonl', fresh=True)
    answers = {
        'build': [{'sent': 1, 'parameters': 1, 'uncompressed': 1}],
        'steps': [{'seconds': [1.0] * 16, 'losses': [1.0] * 16}],
    }

    class Crew:
        ask = staticmethod(lambda do, **order: answers[do])
        sent = staticmethod(lambda: 0)

    class Lab:
        use = staticmethod(lambda link: None)

    rows.start()
    slow.measure(
        Crew(), Lab(), rows, slow.argparse.Namespace(links=['100m', 'none'], steps=16), 'mean'
    )
    assert [r['after'] for r in rows.rows if r['kind'] == 'step'] == [18, 34]
    assert '## none: losses after 34 steps' in slow.markdown(rows.rows)


def test_committed_pages_of_the_benches_are_made_of_their_rows(bench):
    more = [(f'network_{kind}', 23) for kind in ('100m', '100m_eager', '100m_eager4', '200m')]
    kinds = ('100m_zb_h2', 'two', 'two4', 'four', '200m')
    more += [*((f'network_{kind}', 24) for kind in kinds), ('network_two', 25)]
    for kind, day in (('network', 21), ('network_busy', 21), *more):
        lines = bench('slow_report').markdown(bench('slow_report').Results(rows_of(kind, day)))
        page = (RESULTS / f'epyc_2026-11-{day}_{kind}.md').read_text()
        assert '\n'.join(lines) + '\n' == page
    page = (RESULTS / 'epyc_2026-11-21_exchange.md').read_text()
    assert bench('slow_exchange').markdown(rows_of('exchange')) == page
    for day in (23, 24):
        page = (RESULTS / f'epyc_2026-11-{day}_rounds.md').read_text()
        assert bench('slow_rounds').markdown(rows_of('rounds', day)) == page
    paths = [RESULTS / f'epyc_2026-11-21_{kind}.jsonl' for kind in ('polar', 'gradients')]
    text = '\n'.join(polar.markdown(polar.load(paths))) + '\n'
    assert text == paths[0].with_suffix('.md').read_text()


@pytest.mark.parametrize(
    ('cores', 'wires', 'delay', 'time'),
    [(2, (0, 0), 0, 9), (1, (0, 0), 0, 12), (2, (5, 1), 0, 19), (2, (5, 1), 4, 27)],
)
def test_simulated_steps_worked_out_by_hand(cores, wires, delay, time, bench):
    """Two stages, two micro-batches, all forwards first; a forward takes 1, a backward 2."""
    ways = {(0, 1): wires[0], (1, 0): wires[1]}
    found = bench('slow_plan').step(gpipe(2, 2), 12.0, cores, ways, delay)
    assert found == pytest.approx(time)


@pytest.mark.parametrize('name', ['1f1b', 'zb_h2', 'zb_h2(2, 1)'])
def test_simulated_steps_of_one_core_are_all_actions(name, bench):
    """Whatever backwards are in two halves."""
    free = {(0, 1): 0.0, (1, 0): 0.0}
    assert bench('slow_plan').step(named(name)(2, 8), 48.0, 1, free) == pytest.approx(48)


def test_simulated_steps_are_near_the_measured_ones(bench):
    """Arithmetic and bytes explain the committed steps of four stages to 8 %."""
    for kind, day in (('100m_eager', 23), ('100m_eager4', 23), ('four', 24), ('200m', 24)):
        found = bench('slow_report').Results(rows_of(f'network_{kind}', day))
        for what, row in found.steps.items():
            assert found.planned(*what) == pytest.approx(row['step_s'], rel=0.08)


def test_the_page_on_boundaries_is_that_of_its_results(bench):
    """Its tables and its picture, and what four pages say: that the loss adds up."""
    depth, page = bench('depth'), ROOT / 'docs' / 'depth.md'
    results = depth.loaded(ROOT / 'results' / 'depth')
    assert depth.written(results, page) == page.read_text()
    for end in ('svg', 'png'):
        assert depth.mark(results).encode() in page.with_suffix(f'.{end}').read_bytes()
    for name in ('README.md', 'docs/results.md', 'docs/choosing.md', 'docs/finetune.md'):
        assert 'adds up over boundaries' in ' '.join((ROOT / name).read_text().split()), name
    for model in depth.MODELS:  # the sum of what each costs by itself
        job = depth.Job(model, 'wikitext', 7)
        codec = 'outliers(asinh(6), channels=4, causal=True)'
        together = depth.found(results, job, codec).kl
        assert depth.predicted(results, job, codec) == pytest.approx(together, rel=0.1)


@pytest.mark.parametrize('end', ['svg', 'png'])
def test_the_picture_of_the_readme_shows_the_committed_rows(end, bench):
    """`bench/slow_picture.py` draws it again; rows or code that changed have another digest."""
    picture = bench('slow_picture')
    mark = picture.digest((RESULTS / 'epyc_2026-11-21_network.jsonl').read_text())
    assert mark.encode() in (ROOT / 'docs' / f'slow_link.{end}').read_bytes()


def test_the_titles_of_pictures_are_what_the_rows_say(bench):
    """Of the committed rows, and of the same without the best."""
    report = bench('slow_report')
    title = lambda rows: report.headline(report.Results(rows))
    rows = rows_of('network')
    assert 'mlp 7.4 times at 100m (aqsgd2-bw2)' in title(rows)
    assert 'mlp 5.4 times at 300m' in title([r for r in rows if r.get('link') != '100m'])
    title = bench('slow_exchange').headline
    rows = [r for r in rows_of('exchange') if r['kind'] == 'step']
    assert title(rows).startswith('Over 100m, PowerSGD of rank 4 is fastest: 62 ms')
    others = [r for r in rows if 'sgd' not in r['text']]
    assert title(others).startswith('Over 100m, DGC over Top0.1 % is fastest: 126 ms')
    alone = [r for r in rows if r['text'] == 'mean']
    assert title(alone).splitlines()[1] == 'Without a limit, no compression is fastest: 263 ms'
    rows = rows_of('polar')
    assert 'N = 4096 are 7 % above the Shannon bound with scl(8)' in polar.headline(rows)
    others = [r for r in rows if r.get('search', '')[:3] != 'scl']
    assert '12 % above the Shannon bound with argmax' in polar.headline(others)


def test_choices_are_measured_in_rounds(bench):
    """All in each, in another order, which both processes know; first steps do not count."""
    seen, worker = [], bench('planner_worker')
    run = lambda i: lambda: seen.append(i) or 10.0 * len(seen) + i
    found = worker.in_rounds([run(i) for i in range(5)], rounds=3, steps=2)
    turns = [seen[at : at + 15] for at in (0, 15, 30)]
    assert all(sorted(turn) == sorted([*range(5)] * 3) for turn in turns)
    assert all(turn[::3] == turn[1::3] == turn[2::3] for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1
    at = [n for n, i in enumerate(seen, 1) if i == 4]
    assert found[4] == [10.0 * n + 4 for n in at if at.index(n) % 3]
    assert worker.in_rounds([run(i) for i in range(5)], 0, 2) == [[]] * 5


def test_the_planners_bench_takes_a_stage_per_core(bench, monkeypatch, tmp_path):
    """The prediction is of a machine per stage."""
    argv = ['planner.py', '--change', 'model.stages=4', '--out', str(tmp_path / 'rows')]
    monkeypatch.setattr(sys, 'argv', argv)
    with pytest.raises(SystemExit, match='4 stages, and there are 2 cores'):
        bench('planner').main()


def test_the_quietest_turn_of_a_choice_counts(bench):
    rows = [
        {'kind': 'step', 'link': link, 'name': 'raw', 'turn': turn, 'measured': seconds}
        for turn, link, seconds in ((0, 'a', 3.0), (0, 'b', 1.0), (1, 'a', 2.0), (1, 'b', 4.0))
    ]
    found = bench('planner').quietest([{'kind': 'run'}, *rows])
    assert [(r['link'], r['turn'], r['measured']) for r in found] == [('a', 1, 2.0), ('b', 0, 1.0)]


def test_the_planners_bench_compares_losses_seed_by_seed(bench):
    """Means over seeds, and the difference from no compression with its standard error."""
    losses = {'raw; raw': (2.0, 3.0), 'fp16; block(4)': (2.1, 3.3), 'block(4); block(4)': (2.5,)}
    rows = [
        {'kind': 'loss', 'codecs': codecs, 'seed': seed, 'loss': loss}
        for codecs, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    assert bench('planner').said_losses([{'kind': 'run'}, *rows]) == {
        'raw; raw': '2.5000',
        'fp16; block(4)': '2.7000 (+0.2000 ± 0.1000)',
        'block(4); block(4)': '2.5000',
    }


def planner_run(bench, name):
    """Of a run: steps at most 15 % off, all errors, by link how much slower the plan was."""
    path = RESULTS / name
    rows = [json.loads(line) for line in path.with_suffix('.jsonl').read_text().splitlines()]
    assert bench('planner').table(rows) == path.with_suffix('.md').read_text()
    steps = bench('planner').quietest(rows)
    off = [100 * (r['measured'] / r['predicted'] - 1) for r in steps]
    slow = {}
    for link in dict.fromkeys(r['link'] for r in steps):
        own = {r['name']: r for r in steps if r['link'] == link}
        plan = own.pop('the plan')
        slow[link] = 100 * (plan['measured'] / min(r['measured'] for r in own.values()) - 1)
    return sum(abs(a) <= 15 for a in off), off, slow


def test_predicted_steps_are_those_measured(bench):
    """docs/choosing.md says how far off the planner was, and the tables are those of the rows."""
    page = ' '.join((ROOT / 'docs' / 'choosing.md').read_text().split())
    _, off, slow = planner_run(bench, 'epyc_2026-11-25_planner_halves')
    rows = rows_of('planner_halves', 25)
    steps = {(r['link'], r['name']): r for r in bench('planner').quietest(rows)}
    assert f'All {len(off)} steps took {min(off):.0f} to {max(off):.0f} % more than' in page
    gain, loss = plain(steps.values()), lost(rows)
    assert (
        'took {:.1f} to {:.1f} % less than the six of them over 1 Gbit/s, {:.0f} to {:.0f} % less '
        'over 100 Mbit/s, and {:.0f} to {:.0f} % less over 200 Mbit/s + 50 ms.'
    ).format(*gain['1gbit'], *gain['100mbit'], *gain['200mbit,50ms']) in page
    assert 'seeds, was {:.1f}, {:.1f} and {:.1f} % above'.format(*list(loss.values())[:3]) in page
    means = losses_of(rows)
    for link in list(loss)[:3]:
        plan = means[steps[link, 'the plan']['codecs']]
        paper = {
            steps[link, f'{f} forward, {b} backward']['codecs'] for f, b in bench('planner').PAPER
        }
        assert all(plan <= means[codecs] for codecs in paper - {'raw; raw'})
    assert (
        f'took {slow["1gbit"]:.1f} % more than the fastest over 1 Gbit/s, {-slow["100mbit"]:.1f} % '
        f'less than all over 100 Mbit/s, and {slow["200mbit,50ms"]:.1f} % more than the fastest '
    ) in page
    raw, plan = (steps['1gbit', n] for n in ('raw forward, raw backward', 'the plan'))
    assert (raw['codecs'], raw['order']) == (plan['codecs'], plan['order'])
    same = 100 * (1 - raw['measured'] / plan['measured'])
    assert f'the same choice by hand took {same:.1f} % less' in page
    took = {name: r['measured'] for (link, name), r in steps.items() if link == '10mbit'}
    plan = took['the plan']
    ratios = [took[f'{f} forward, {b} backward'] / plan for f, b in (
        ('raw', 'raw'), ('uniform(4)', 'uniform(8)'), ('uniform(4)', 'uniform(4)')
    )]  # fmt: skip
    assert plan == min(took.values())
    assert (
        f'took {1e3 * plan:.0f} ms, less than all others: in the schedules that suit them, no '
        f"compression takes {ratios[0]:.1f} times as long, the paper's four bits forward and eight "
        f'backward {ratios[1]:.1f} times, its four bits both ways {ratios[2]:.2f} times. '
        f'Its loss was {loss["10mbit"]:.1f} % above'
    ) in page
    for path in RESULTS.glob('*planner*.jsonl'):
        planner_run(bench, path.stem)


def plain(steps):
    """By link: by how much less the plan took, in percent, than the fastest and slowest of 1F1B."""
    found = {}
    for link in {r['link'] for r in steps}:
        took = {r['name']: r['measured'] for r in steps if r['link'] == link}
        gains = [100 * (1 - took['the plan'] / t) for name, t in took.items() if '1F1B' in name]
        found[link] = min(gains), max(gains)
    return found


def losses_of(rows):
    """Mean losses by codecs."""
    losses = {}
    for r in (r for r in rows if r['kind'] == 'loss'):
        losses.setdefault(r['codecs'], []).append(r['loss'])
    return {codecs: sum(own) / len(own) for codecs, own in losses.items()}


def lost(rows):
    """By link: by how much the plan's mean loss is above that of no compression, in percent."""
    means = losses_of(rows)
    plans = {r['link']: means[r['codecs']] for r in rows if r.get('name') == 'the plan'}
    return {link: 100 * (own / means['raw; raw'] - 1) for link, own in plans.items()}


def test_a_verdict_is_right_where_both_ratios_say_the_same(bench):
    pays = bench('pays')
    cases = (0.8, 0.9, True), (0.8, 1.2, False), (0.99, 1.2, True), (1.3, 2.0, True)
    assert [pays.right(p, m) for p, m, _ in cases] == [found for *_, found in cases]


def test_the_table_of_predicted_and_measured_steps(bench):
    """A plan of .8 of a step alone that took 1.2, of a process that had its core half the time."""
    run = {'kind': 'run', 'hardware': 'h', 'versions': {'jax': '1'}, 'commit': 'c', 'cores': [0, 1]}
    steps = {
        'predicted': {'alone': 1.0, 'raw': 2.0, 'plan': 0.8},
        'measured': {'alone': 1.0, 'raw': 2.5, 'plan': 1.2, 'cpu_alone': 0.5},
    }
    row = {'kind': 'step', 'model': 'digits', 'link': '5mbit', **steps}
    page = bench('pays').table([{**run, 'command': 'pays.py'}, row])
    assert page.endswith(
        '| digits | 5mbit | 1000.0 / 1000.0 | 2000.0 / 2500.0 | -20% | 800.0 / 1200.0 | -33% '
        '| 0.80: pays | 1.20: does not pay | **no** | 50% |\n'
    )


def test_the_bench_of_generation_goes_on_where_it_was_stopped(bench, monkeypatch, tmp_path):
    """Interrupted at its fourth row; the same command measures the others alone."""
    serving, measured, left = bench('serving'), [], [3]

    def tokens(a, *key):
        if len(measured) == left[0]:
            raise KeyboardInterrupt
        measured.append(key)
        return 10.0 * key[0]

    monkeypatch.setattr(serving, 'tokens_a_second', tokens)
    score = {'bits': 4.0, 'nats_lost': 0.01, 'standard_error': 0.002}
    monkeypatch.setattr(serving, 'lost', lambda a, stages: {'raw': score, 'mx(8)': score})
    out = tmp_path / 'serving'
    words = ['serving.py', 'model.gguf', '--processes=2', '--links=100mbit', f'--out={out}']
    monkeypatch.setattr('sys.argv', [*words, '--codecs=raw;mx(8)', '--turns=1'])
    with pytest.raises(KeyboardInterrupt):
        serving.main()
    left[0] = -1
    serving.main()
    assert len(measured) == len(set(measured)) == 2 + 2 * 2
    page = out.with_suffix('.md').read_text()
    assert page.endswith('| 100mbit | `mx(8)` | 4.00 | 20 | 20 (x1.00) | 0.0100 ± 0.0020 |\n')
    assert 'One machine alone: 10 a second with 1 prompts, 10 a second with 4 prompts.' in page


def test_the_bench_of_generation_makes_a_model_of_equal_blocks(bench, monkeypatch, tmp_path):
    """In four stages its parameters are equal but for the table; without a model it says so."""
    serving = bench('serving')
    folder = serving.write_random(tmp_path, 4, 128)
    model = open_language_model(str(folder), 4, tokenizer='bytes')
    blocks = [stage['params']['layers'] for stage in model.variables]
    sizes = [sum(a.size for a in jax.tree.leaves(block)) for block in blocks]
    assert len(set(sizes)) == 1
    assert sizes[0] == 15 * 128**2 + 2 * 128
    monkeypatch.setattr('sys.argv', ['serving.py'])
    with pytest.raises(SystemExit):
        serving.main()


def test_the_file_of_a_split_has_its_cut_and_its_place(bench, tmp_path):
    splits = bench('splits')
    texts = ['model.blocks=6', 'model.cuts=2', 'parallel.runtime=mpmd', 'parallel.place=1 0']
    (tmp_path / 'split.py').write_text(splits.FILE.format(texts=texts))
    config = load(str(tmp_path / 'split.py'))
    assert (config.model.cuts, config.parallel.place) == ('2', '1 0')


def test_the_measures_of_a_text_are_counted(bench):
    statements = bench('statements')
    body = '\n'.join(f'    b{i} = {i}' for i in range(26))
    text = f'"""Doc."""\nfrom typing import Any\ndef f(own: Any, x: Any):\n    """Doc."""\n{body}\n'
    counts = statements.measured(text)
    assert counts == {
        'statements': 28, 'lines of code': 28, 'Any': 2, 'empty names': 1,
        'lines with a comment': 0, 'long functions': 1, 'long without comment': 1,
    }  # fmt: skip
    assert statements.measured(text + '    # Why.\n    own = 1  # and how\n') == counts | {
        'statements': 29, 'lines of code': 29, 'empty names': 2, 'lines with a comment': 2,
        'long without comment': 0,
    }  # fmt: skip


def test_rooms_that_import_each_other_are_found(bench, tmp_path):
    statements = bench('statements')
    root = tmp_path / 'jaxmp'
    root.mkdir()
    lines = {'a': 'from jaxmp import b', 'b': 'from jaxmp.c import d', 'c': 'from jaxmp.a import e'}
    for name, line in {**lines, 'd': 'from jaxmp.a import f'}.items():
        (root / f'{name}.py').write_text(line)
    assert statements.arrows(root) == {'a': {'b'}, 'b': {'c'}, 'c': {'a'}, 'd': {'a'}}
    assert sorted(statements.in_circles(statements.arrows(root))) == ['a', 'b', 'c']


def test_texts_are_made_of_a_page_and_of_chats(bench):
    """Markup, code and what only a browser shows are left out, and so is a chat that is no chat."""
    texts = bench('texts')
    page = '<noscript><p>JS</p></noscript><h1>A</h1><p>Das <b>ist</b>\n es.</p><p></p><pre>ls</pre>'
    assert texts.german(f'{page}<p>Gut &amp; ja.</p>') == 'Das ist es.\nGut & ja.\n'
    assert texts.cut('ä\nö\nü', 7) == 'ä\nö\n'
    assert texts.cut('ä\nö\n', 6) == 'ä\nö\n'  # which it fills

    def conversation(*words, first='human'):
        names = ['human', 'gpt'] if first == 'human' else ['gpt', 'human']
        turns = [{'from': names[i % 2], 'value': w} for i, w in enumerate(words)]
        return {'id': 'a', 'conversations': turns}

    kept = conversation('Hi', 'Hello ', 'So?', 'Yes.')
    others = [
        conversation('Hi', 'Hello'),
        conversation('Hi', 'Hello', '```x```', 'Yes.'),
        conversation('Hi', 'Grüße', 'So?', 'Yes.'),
        conversation('Hi', 'Hello', 'So?', 'Yes.', first='gpt'),
    ]
    cut_off = json.dumps([kept, *others, kept, kept])[:-30]
    chat = 'User: Hi\nAssistant: Hello\nUser: So?\nAssistant: Yes.\n'
    assert texts.chat(cut_off) == f'{chat}\n{chat}'


def report_rows():
    """Rows as the benches write them: one bar missed, one mean below Shannon's bound."""
    versions = {'versions': {'jax': '0'}, 'commit': 'c', 'hardware': 'h', 'command': 'bench'}
    yield {'kind': 'run'} | versions
    shared = {'kind': 'distortion', 'size': 1024, 'rate': 0.5, 'bound': 0.11, 'error': 0.001}
    for search, construction, mean in [
        ('argmax', 'genie', 0.1264),
        ('scl(8)', 'genie', 0.1194),
        ('randomised', 'genie', 0.109),
        ('randomised', 'bhattacharyya', 0.14),
    ]:
        found = {'search': search, 'construction': construction, 'mean': mean, 'blocks': 7}
        thesis = {'thesis': 0.13, 'deviation': 0.01 * 3**0.5} if mean == 0.14 else {}
        yield shared | found | thesis
    times = {'encode_ns': 9.0, 'decode_ns': 21.0, 'compile_encode_s': 1, 'compile_decode_s': 2}
    yield {'kind': 'speed', 'codec': 'polar', 'size': 4, 'blocks': 2, 'repeats': 1} | times
    yield {'kind': 'scalars', 'bits': 0.5, 'nmse': 0.617}
    codec = {'kind': 'codec', 'codec': 'polar(0.5)', 'elements': 9, 'bits': 0.5}
    yield codec | times | {'vector': 'normal', 'nmse': 0.537}


def test_report(tmp_path, capsys):
    source = tmp_path / 'rows.jsonl'
    source.write_text('\n'.join(map(json.dumps, report_rows())))
    with pytest.raises(SystemExit, match='1'):  # bars are missed
        polar.main([str(source), '--out', str(tmp_path / 'out')])
    text = (tmp_path / 'out.md').read_text()
    assert text in capsys.readouterr().out
    assert '**0.1264 ± 0.00100** | 0.1194 ± 0.00100 FAIL | 0.1090 ± 0.00100 FAIL | 0.1400' in text
    assert 'Targets: 1 of 3 met' in text
    assert 'below the Shannon bound: 1 of 4' in text
    assert '| 1024 | 0.5 | 0.1300 | 0.1400 ± 0.00100 | -1.0 |' in text
    assert 'encode 9.0 ns <= 200' in text
    assert 'FAIL: `polar` decode 21.0 ns <= 20' in text
    assert '`bench`, 1 call(s): commit c, h, jax 0' in text
    assert 'pass: `polar(0.5)` on normal data 0.5370, target 0.537' in text
    assert '| `polar(0.5)` | 0.500 | 0.5 | 0.537 | 9.0 | 21.0 |' in text
    assert (tmp_path / 'out.png').read_bytes()[:4] == b'\x89PNG'


def test_report_refuses_other_rows(tmp_path):
    (tmp_path / 'rows.jsonl').write_text('{"kind": "step"}')
    with pytest.raises(SystemExit, match="kinds \\['step'\\]"):
        polar.main([str(tmp_path / 'rows.jsonl'), '--out', str(tmp_path / 'out')])


def test_the_page_on_collectives_has_the_programs_that_were_run(bench):
    """The committed rows; without codecs nothing differs from JAX's own collectives."""
    programs, layers = bench('public_programs'), bench('public_layers')
    files = 'public_programs.json', 'public_layers.json'
    rows = [row for file in files for row in json.loads((RESULTS / file).read_text())['rows']]
    page = (ROOT / 'docs' / 'own_collectives.md').read_text()
    assert f'<!-- programs -->\n{programs.table(rows)}<!-- /programs -->' in page
    parts = bench('tensor_parallel')
    found = json.loads((RESULTS / 'tensor_parallel_smollm2.json').read_text())
    shown = f'<!-- tensor_parallel -->\n{parts.table(found["rows"])}<!-- /tensor_parallel -->'
    assert shown in page
    by_way = {(row['program'], row['way']): row for row in rows}
    for program in (*programs.PROGRAMS, *layers.LAYERS):
        raw, theirs = by_way[program, 'raw'], by_way[program, 'as it is']
        assert raw['gradient_off'] == 0
        assert {**raw, 'way': '', 'codecs': None} == {**theirs, 'way': ''}


def test_the_page_on_two_desks_has_what_was_run_and_what_follows(bench):
    """Parameters by formula are those that were held; one block is at least what XLA counts."""
    base, desks = bench('quantised_base'), bench('two_desks')
    found = json.loads((RESULTS / 'quantised_base.json').read_text())
    rows = {(r['what'], r['dtype']): r for r in found['rows']}
    page = (ROOT / 'docs' / 'two_desks.md').read_text()
    for name, table in (
        ('quantised_base', base.table(found['rows'])),
        ('two_desks', desks.memory_table()), ('two_desks_speed', desks.speed_table()),
    ):  # fmt: skip
        assert f'<!-- {name} -->\n{table}<!-- /{name} -->' in page
    assert len(re.findall(r'\S*\w\S*', page)) <= 500
    assert found['steps'] == 32
    assert found['logits_equal']
    assert found['gradient_off'] < 1e-5
    wide, blocks = rows['model', 'float32'], rows['model', 'file']
    assert blocks['loss_off'] < 1e-4
    assert blocks['cpu_ms'] < 1.1 * wide['cpu_ms']
    assert rows['stage', 'file']['reading'] < 1.1 * rows['stage', 'file']['kept']
    sizes, tokens = desks.MODELS['SmolLM2 135M'], found['batch'] * found['length']
    for (what, dtype), row in rows.items():
        stages, params = desks.stages_of(sizes, dtype, {'model': 1, 'stage': 4}[what])
        s = what == 'stage'
        parts = desks.row(sizes, dtype, stages[s], params[s], tokens, products=4)
        held = parts['frozen'] + parts['adapters'] / 4
        assert held / 1e6 == pytest.approx(row['kept'], abs=0.1)
        if what == 'stage' and dtype != 'bfloat16':  # XLA:CPU widens all of a bf16 stage at once
            counted = (parts['inputs'] + parts['one block']) / 1e6
            assert counted / 1.4 < row['temporary'] < counted
