"""The report on the committed results: its commands, its statistics, what is judged by what."""

import ast
import json
import math
import re
import shlex
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image

from jaxmp import config
from jaxmp.pictures import curves
from jaxmp.runtimes import placement
from jaxmp.sweep import runner
from jaxmp.training.experiment import experiment_of
from jaxmp.training.summary import finish
from study.report import (
    captions,
    claims,
    epochs,
    figures,
    gap,
    page,
    points,
    residuals,
    results,
    tables,
)
from study.report import command as report
from study.report.paper import PAPER, REGISTERED, paper_row
from tests.base import ROOT
from tests.runs import config_of

PAGES = ('docs/results.md', 'docs/findings.md', 'docs/paper.md', 'docs/late.md')


def command(name):
    """The README's command line of a command, as arguments."""
    line = re.search(
        rf'^(?:jaxmp|python -m study) {name} (.*)$', (ROOT / 'README.md').read_text(), re.M
    )
    return shlex.split(line[1])


@pytest.fixture(scope='module')
def studies():
    return {s.name: s for s in results.load(ROOT / 'results')}


def test_the_study_of_the_readme_is_finished(monkeypatch, capsys):
    """A key that a result lacks counts as its default, so no committed result is refused."""
    monkeypatch.chdir(ROOT)
    runner.main([*command('sweep'), '--tables=1,2,3,4,5', '--plan'])
    assert re.search(r'\n\d+ runs, 0 to do', capsys.readouterr().out)


def test_no_default_is_said_in_code():
    """The schema is complete: nothing asks a configuration for a key with a default of its own."""
    for path in (ROOT / 'jaxmp').rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=of, attr='get'), args=[_, _]):
                    assert not re.search(r"(config|\['config'\])$", ast.unparse(of)), path


def test_results_have_no_unknown_key_and_a_missing_one_is_its_default(studies):
    """The committed ones, flat before, were migrated by results/migrate.py."""
    for study in studies.values():
        for row in study.rows.values():
            for run in row.runs:
                own = {'model.bottleneck', 'model.embed_every_stage'}
                own = own if run['config']['model']['name'] == results.NARROW else set()
                assert set(config.flat(run['config'])) <= {*config.KEYS, *own}
                whole = config.complete(run['config']).to_dict()
                assert config.settings(run['config']) == config.settings(whole)


@pytest.mark.slow
def test_the_committed_report_is_what_the_readme_makes(monkeypatch, tmp_path):
    """To the byte; a picture whose data or whose code changed is drawn again and then differs."""
    monkeypatch.chdir(ROOT)
    committed, made = ROOT / 'docs' / 'report', tmp_path / 'report'
    shutil.copytree(committed, made, ignore=shutil.ignore_patterns('*.md', '*.html', '*.csv'))
    words = command('report')
    assert words == ['results', '--out', 'docs/report', '--into', *PAGES]
    copies = [tmp_path / p.replace('/', '_') for p in PAGES]
    for name, copy in zip(PAGES, copies, strict=True):
        shutil.copy(name, copy)
    report.main(['results', '--out', str(made), '--into', *map(str, copies)])
    found = {p.name: p.read_bytes() for p in made.iterdir()}
    assert found.keys() == {p.name for p in committed.iterdir()}
    assert [n for n, b in found.items() if b != (committed / n).read_bytes()] == []
    shown = set(re.findall(r'\]\((\S+\.png)\)', found['report.md'].decode()))
    assert shown == {n for n in found if n.endswith('.png')}
    for name, copy in zip(PAGES, copies, strict=True):
        assert copy.read_text() == (ROOT / name).read_text(), name


def test_a_sweep_keeps_its_programs_by_the_number_of_cores(monkeypatch, tmp_path):
    kept = {}
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
    monkeypatch.setattr(jax.config, 'update', lambda key, value: kept.update({key: value}))
    words = ['--scale=cpu', '--rows=none', '--out', str(ROOT / 'results'), '--work', str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        runner.main([str(ROOT / 'configs' / 'paper_tables.py'), *words])
    assert ended.value.code == 0
    assert kept['jax_compilation_cache_dir'].endswith(f'{placement.cores()}_cores')


def summary(**changes):
    """A run of three epochs, the first of them a warm-up: 90, 50 and 60 % off."""
    curve = {'loss': [0.1, 0.5, 0.4], 'accuracy': [0.9, 0.5, 0.6]}
    scores = {
        'best': {'epoch': 1, 'loss': 0.1, 'accuracy': 0.9},
        'last': {'epoch': 3, 'loss': 0.4, 'accuracy': 0.6},
    }
    values = {'name': 'ef', 'seed': 0, 'epochs': 3, 'phases': 'raw@:1', 'model': {'name': 'lenet'}}
    return {
        'name': 'ef',
        'fwd': 'ef(top_k(0.1))',
        'bwd': 'raw',
        'seed': 0,
        'test': {'off': scores, 'on': scores},
        'history': {'train': curve, 'off': curve, 'on': curve},
        'bytes': [{'boundary': 1, 'uncompressed': 100, 'forward': 10, 'backward': 10}],
        'config': {**values, **changes.pop('config', {})},
        **changes,
    }


def test_best_leaves_the_warmup_out_and_bits_count_it():
    row = results.Row('ef', (summary(),))
    assert results.best(row, 'off') == 60.0
    assert results.wire(row)['bits'] == pytest.approx(32 / 3 + 3.2 * 2 / 3)
    bare = {k: v for k, v in summary().items() if k != 'history'}
    assert results.best(results.Row('ef', (bare,)), 'off') == 60.0


@pytest.mark.parametrize(('name', 'bits'), [(results.NARROW, 1.6), ('resnet18', 3.2)])
def test_bits_of_a_bottleneck_are_per_channel_of_the_model_without(name, bits):
    config = {'phases': '', 'model': {'name': name, 'width': 96, 'bottleneck': 48}}
    found = results.wire(results.Row('ef', (summary(config=config),)))
    assert found['bits'] == pytest.approx(bits)


def test_ef_with_a_warmup_of_a_fifth_sends_ten_bits(studies):
    assert results.wire(studies['cpu'].rows['ef-top10-warm20'])['bits'] == pytest.approx(
        9.77, abs=0.01
    )


@pytest.mark.parametrize(
    ('fwd', 'judged'),
    [
        ('top_k(0.1)', 'on'),
        ('raw', 'on'),
        ('ef21(top_k(0.1))', 'off'),
        (' ef21(top_k(0.1))', 'off'),
        ('raw; ef21(top_k(0.1))', 'off'),
        ('ef_mixed(top_k(0.05), accumulate=True)', 'off'),
        ('aqsgd(top_k(0.3), examples=examples)', 'off'),
        ('klt(2)', 'on'),
        ('anchored(uniform(2), vocabulary)', 'on'),
        ('raw; anchored(uniform(2), 16); aqsgd(raw, 9)', 'off'),
        ('efficient(2)', 'on'),  # a word of one's own
    ],
)
def test_what_remembers_positions_or_examples_is_judged_off(fwd, judged):
    """Of a result that does not say what its channels remember: what a test does not have."""
    assert results.Row('', (summary(fwd=fwd),)).judged == judged


@pytest.mark.parametrize(
    ('state_of', 'judged'),
    [([], 'on'), (['', 'token', 'channel'], 'on'), (['', 'position'], 'off'), (['example'], 'off')],
)
def test_a_row_is_judged_by_what_its_summary_says(state_of, judged):
    """Whatever its text is, such as a word of one's own."""
    for fwd in 'ef(raw)', 'mine(raw)':
        assert results.Row('', (summary(fwd=fwd, state_of=state_of),)).judged == judged


def test_a_run_says_what_each_of_its_boundaries_remembers(tmp_path):
    setting = config_of('text_gpt2', fwd='raw; anchored(raw, vocabulary); ef21(uniform(4))')
    exp = experiment_of(setting)
    scores = {'step': 5, 'epoch': 1, **dict.fromkeys(exp.task.scores, 1.0)}
    records = [{'kind': 'test', 'compression': mode, **scores} for mode in ('off', 'on')]
    (workdir := tmp_path / 'run').mkdir()
    finish(exp, 1, {'seconds': 1.0}, [{'kind': 'train', **scores}, *records], {}, workdir)
    [row] = results.load(tmp_path)[0].rows.values()
    assert row.runs[0]['state_of'] == ['', 'token', 'position']
    assert row.judged == 'off'


def test_the_readings_of_a_row_stand_beside_each_other(studies):
    """Two readings of EF-mixed are two rows of Table 3, as is a third under a name of its own."""
    rows = dict(studies['cpu'].rows)
    rows['ef_mixed_sum-top10-warm20'] = rows['ef_mixed-top10-warm20']
    study = results.Study('cpu', rows)
    table = next(t for t in PAPER['tables'] if t['table'] == 3)
    labels = [line[0] for line in tables.lines(table, study)]
    assert {l.split('; ')[1] for l in labels if l.startswith('ef_mixed')} == {
        'e = x - C(x)',
        'e = x - C(x), sum',
        'e accumulated',
    }
    assert not [line for line in tables.others(study, 'accuracy') if 'ef_mixed' in line[0]]
    assert sum(v.verdict != 'undecided' for v in claims.judge(study)) > 0


def test_a_text_is_no_row_of_a_table_of_accuracies(studies):
    """A worse loss is not fewer errors: no claim and no table of accuracies takes it as a score."""
    study = studies['few_bits_text']
    assert {'top10', 'top10-fp16', 'none'} <= study.rows.keys()
    for own in (claims.judge(study), claims.judge(study, REGISTERED['claims'])):
        assert not [e for verdict in own for e in verdict.evidence if e.ours]
    assert not [line for table in PAPER['tables'] for line in tables.lines(table, study)]
    rest = {line[0]: line for line in tables.others(study, 'perplexity')}
    assert rest.keys() == study.rows.keys()
    at = tables.with_heads(tables.HEADS['perplexity']).index('less none, nats')
    assert rest['none'][1:3] == ['`raw`', '`raw`']
    assert rest['none'][at] == tables.NONE
    assert float(rest['top10'][at].split()[0]) > 1


def test_exchanges_may_differ_in_their_optimizer_and_in_nothing_else(tmp_path):
    def run(name, **config):
        return summary(name=name, fwd='raw', exchange={}, config=config)

    study = results.study(
        tmp_path,
        'rates',
        [
            run('a', optimizer={'lr': 0.1, 'momentum': 0.5}),
            run('b', optimizer={'lr': 0.2, 'name': 'adamw', 'clip_norm': 1.0}),
        ],
    )
    assert len(study.rows) == 2
    with pytest.raises(ValueError, match=r'different settings: batch_size=1 and 2'):
        results.study(tmp_path, 'sizes', [run('a', batch_size=1), run('b', batch_size=2)])


def test_a_setting_that_differs_is_not_said_of_all(studies):
    said = page.setting(studies['mnist_dataparallel'])
    assert 'optimizer.lr 0.02' not in said
    assert 'By row: exchange, optimizer.lr, optimizer.momentum.' in said


def test_the_residual_of_two_rows_is_that_of_their_differences():
    """Over two rows with the same seeds the shared residual is the paired t test."""
    column = {'a': {0: 1.0, 1: 2.5, 2: 2.0}, 'b': {0: 0.0, 1: 1.0, 2: 1.5}}
    found = residuals.residual(column, seeds=True)
    apart = [column['a'][s] - column['b'][s] for s in range(3)]
    alone = residuals.estimate(apart)
    shared = residuals.estimate(apart, found.deviation * 2**0.5, found.freedom)
    np.testing.assert_allclose(shared, alone)


def test_many_rows_tell_the_residual_of_few_seeds():
    """The interval holds the truth as often as it says, and a row that varies more is left out."""
    r = np.random.default_rng(0)
    held, deviations = 0, []
    for _ in range(200):
        seeds = r.normal(0, 2, 2)
        column = {str(row): {s: float(seeds[s] + r.normal()) for s in range(2)} for row in range(8)}
        found = residuals.residual(column, seeds=True)
        apart = [column['0'][s] - column['1'][s] for s in range(2)]
        e = residuals.estimate(apart, found.deviation * 2**0.5, found.freedom)
        held += e.low < 0 < e.high
        deviations.append(found.deviation)
    assert 0.90 < held / 200 < 0.99
    assert np.mean(deviations) == pytest.approx(1, abs=0.1)
    column['wild'] = {0: 0.0, 1: 60.0}
    assert 'wild' not in residuals.agreeing(column)
    assert len(residuals.agreeing(column)) == 8


@pytest.mark.parametrize(('seeds', 'points'), [(2, 15.0), (3, 4.2), (5, 2.2), (8, 1.5)])
def test_the_power_of_few_seeds(seeds, points):
    """Points beyond a bound that are found four times of five, at a deviation of 1.3."""
    e = residuals.estimate([0.0] * seeds, 1.3, seeds - 1)
    assert residuals.detectable(e) == pytest.approx(points, abs=0.05)


def test_holm_decides_among_all_tests():
    """One quantity in ten with p = .02 alone decides nothing; one with p = .004 does."""
    e = claims.Evidence('', claims.RATIO, 0.0, 0.0, residuals.estimate([1.0, 2.0]), 0.0)
    for p, verdict in ((0.02, 'undecided'), (0.004, 'supported')):
        found = claims.decided([e._replace(p=p), *[e._replace(p=0.9)] * 9], ['above'] * 10)
        assert found[0].verdict == verdict
    assert claims.decided([e._replace(p=0.004)], ['below'])[0].verdict == 'contradicted'


def test_a_registered_quantity_is_in_points(studies):
    study = studies['few_bits_cpu']
    mean = lambda row: results.last(study.rows[row], 'on').mean
    given = REGISTERED['claims']
    judged = {c['id']: v for c, v in zip(given, claims.judge(study, given), strict=True)}
    primary, two = judged['equal bytes'], judged['lloyd2']
    assert primary.verdict == 'supported'
    assert primary.evidence[0].ours.mean == pytest.approx(mean('top40-log4') - mean('top10-fp16'))
    assert two.evidence[0].bound == 1
    assert two.evidence[0].ours.mean == pytest.approx(mean('none') - mean('lloyd2'))
    assert judged['block2'].evidence[0].verdict == 'not run: block2'


def test_the_margin_holds_what_the_paper_says_of_its_own_tables():
    """Every test of a claim is met by the paper's numbers, and the margin's reason names them."""
    nothing = results.Study('', {})
    for claim in PAPER['claims']:
        for test in claim['tests']:
            e = claims.weigh(test, nothing)
            assert math.isnan(e.paper) == (test['quantity'] == 'training loss'), e.text
            if not math.isnan(e.paper):
                assert (e.paper > e.bound) == (test['side'] == 'above'), e.text
    why = PAPER['margin']['why']
    said = {float(n) for n in re.findall(r'(\d+\.\d) %', why)}
    rows = ('fw4-bw8', 'top10', 'fw4-bw6', 'top5', 'fw4-bw4')
    errors = [100 - paper_row(r)['on'] for r in rows]
    errors += [100 - paper_row(f'aqsgd-top{k}-warm10')['off'] for k in (30, 20)]
    assert said == {round(100 * (e / 7 - 1), 1) for e in errors}
    harmless, harmful = why.split('what it calls harmful')
    allowed = [100 * m for m in PAPER['margin']['allowed']]
    numbers = lambda text: map(float, re.findall(r'(\d+\.\d) %', text))
    assert allowed == pytest.approx([max(numbers(harmless)), min(numbers(harmful))])


def verdict_of(study, claim):
    """The verdict on a claim of the paper, by its id."""
    found = zip(PAPER['claims'], claims.judge(study), strict=True)
    return next(v for c, v in found if c['id'] == claim)


def test_convergence_is_judged_by_training_and_on_against_on(studies):
    """EF21 off against TopK on is fewer errors on CIFAR-10; that is no better training."""
    study = studies['converged']
    found = verdict_of(study, 'ef')
    assert {e.text.partition(' of ')[0] for e in found.evidence} == {'training loss', 'errors'}
    assert not [e for e in found.evidence if '(off)' in e.text]
    assert found.verdict == 'undecided'
    [e] = [e for e in found.evidence if e.text.startswith('errors of ef21-top10 (on)')]
    own, other = (results.by_seed(study.rows[r], 'on') for r in ('ef21-top10', 'top10'))
    assert e.points == pytest.approx(np.mean([own[s] - other[s] for s in own]))
    [e] = [e for e in found.evidence if e.text.startswith('training loss of ef21-top10 against')]
    loss = lambda row: {r['seed']: r['history']['train']['loss'][-1] for r in study.rows[row].runs}
    own, other = loss('ef21-top10'), loss('top10')
    assert (e.unit, e.ours.seeds) == (claims.NATS, 5)
    assert e.ours.mean == pytest.approx(np.mean([own[s] - other[s] for s in own]))
    usable = verdict_of(study, 'ef gap')
    assert all(e.text.count('(off)') == 2 for e in usable.evidence)
    assert usable.verdict == 'supported'


def test_a_verdict_says_at_which_margins_it_would_differ(studies):
    """AQ-SGD over Top30 % has a number alone: the paper's words allow margins on both sides."""
    found = verdict_of(studies['converged'], 'aqsgd')
    assert found.verdict == claims.OPEN
    thirty, twenty = found.evidence
    assert thirty.margins == 'contradicted to 20 %, undecided from 20.5 %, supported from 24.5 %'
    assert page.said(found) == (
        '**depends on the margin**<br>errors of aqsgd-top30-warm10 (off) against none (on): '
        'below +20 %; is +22.2 % [+21.0 %, +23.5 %]'
    )
    assert twenty.verdict == 'supported'
    assert twenty.margins == 'supported to 48.5 %, undecided from 49 %'
    zero = verdict_of(studies['converged'], 'ef').evidence
    assert {e.margins for e in zero} == {''}
    given = REGISTERED['claims']
    judged = zip(given, claims.judge(studies['few_bits_cpu'], given), strict=True)
    [points_] = [v.evidence[0] for c, v in judged if c['id'] == 'lloyd2']
    assert points_.margins.endswith('points')
    for study in studies.values():  # at the margin itself the scan says what the verdict is
        for v in claims.judge(study):
            for e in v.evidence:
                if e.margins and e.verdict != claims.OPEN:
                    assert verdict_at(e.margins, 20) == e.verdict, e


def verdict_at(text, percent):
    """What a text of `claims.said` says of a margin."""
    if ' to ' in text and ' from ' in text and ',' not in text:
        return text.partition(' ')[0]
    first, *rest = text.split(', ')
    found = first.partition(' ')[0]
    for part in rest:
        word, _, start = part.partition(' from ')
        found = word if float(start.removesuffix(' %')) <= percent else found
    return found


def test_rows_older_than_the_mending_of_their_codec_say_so(studies, tmp_path):
    """Rows of `klt` by gradient or with phases; others of that study, and later runs, do not."""
    rows = studies['few_bits_converged'].rows
    old = {n for n, r in rows.items() if r.mended}
    by_gradient = {n for n, r in rows.items() if 'by_gradient' in r.runs[0]['fwd']}
    changed = {n for n in rows if 'klt' in rows[n].runs[0]['fwd'] and rows[n].runs[0]['phases']}
    assert old == by_gradient | changed
    assert {'weighed2', 'entropy-weaned2.7', 'patches-weaned2'} <= old
    assert not [r for s in studies.values() for r in s.rows.values() if r.mended and s.rows != rows]
    table = report.overview(studies['few_bits_converged'])
    assert {line.split(' | ')[0][2:] for line in table.splitlines() if '†' in line[:40]} >= {
        f'{n} †' for n in old
    }
    assert '\n\n† sent by `klt`, which was mended since' in table
    assert all(name.endswith(' †') for name in captions.names([rows[n] for n in sorted(old)]))
    (tmp_path / 'mended.json').write_text(
        json.dumps({'codec': 'ef', 'what': 'which was wrong', 'commits': ['a']})
    )
    for commit, said in (('a', 'sent by `ef`, which was wrong'), ('b', '')):
        study = results.study(tmp_path, 'x', [summary(commit=commit)])
        assert study.rows['ef'].mended == said


def test_points_stand_at_their_bits(studies):
    """Also those of equal bits: no place of a point, nor of its interval, is moved."""
    from jaxmp.pictures import style

    rows = studies['few_bits_mnist'].rows
    data = points.points([rows[n] for n in ('none', 'lloyd2', 'trellis2')])
    with style.style():
        figure = style.figure(8, 4)
        points.paint(figure, data)
    axes = figure.axes[0]
    drawn = sorted(
        line.get_xdata()[0]
        for line in axes.lines
        if line.get_marker() == 'o' and len(line.get_xdata())
    )
    assert drawn == sorted(results.wire(rows[n])['bits'] for n in ('none', 'lloyd2', 'trellis2'))
    assert drawn[0] == drawn[1]


def test_the_picture_of_error_feedback_has_plain_topk(studies):
    """EF is compared with it; every line of the gap says its number of seeds."""
    from jaxmp.pictures import style

    pictures = {p.file: p for p in figures.pictures(studies['converged'])}
    assert {'Top10 %', 'Top5 %', 'EF21 over Top10 %'} <= pictures[
        'converged_figure4.png'
    ].data.rows.keys()
    data = gap.gap([*studies.values()])
    with style.style():
        figure = style.figure(8, 4)
        gap.paint(figure, data)
    told = [t.get_text() for t in figure.axes[0].texts]
    for name, seeds in data.ratios.items():
        assert f'{name}, n = {len(seeds)}' in told
    assert [t for t in told if re.fullmatch(r'BatchNorm estimated again: 1\.03, n = 1', t)]


def test_runs_with_default_names_are_compared_legibly(tmp_path):
    """Labels say whole keys where a word is not enough, and no text lies on another or outside."""
    from jaxmp.pictures import compare, style

    names = ('none', 'top10', 'aqsgd-top20-warm10', 'ef_mixed_accumulated-top10-warm20')
    paths = [ROOT / 'results' / 'mnist' / f'{n}-s0.json' for n in names]
    paths.append(ROOT / 'results' / 'few_bits' / 'converged' / 'entropy-weaned2.7-s0.json')
    runs = {f'runs/{p.stem}': json.loads(p.read_text()) for p in paths}
    for run in runs.values():
        run['config']['name'] = 'run'
    shown = compare.labelled(runs)
    labels = list(shown)
    start = 'runs/none-s0, data.name mnist, pool 1, augment none, model.name lenet, '
    assert labels[0].startswith(start)
    assert ', phases none, ' in labels[0]
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, 'save', lambda figure, path: drawn.append(figure))
        for kept in (shown, dict(list(shown.items())[:2])):
            compare.draw(tmp_path / 'x.png', kept)
    for figure in drawn:
        with style.style():
            figure.draw_without_rendering()
        [key] = figure.legends
        boxes = [t.get_window_extent() for t in (*key.get_texts(), key.get_title())]
        boxes += [axes.get_tightbbox() for axes in figure.axes]
        boxes += [figure._suptitle.get_window_extent()]
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
        width, height = figure.bbox.extents[2:]
        assert all(b.x0 >= 0 and b.x1 <= width and b.y0 >= 0 and b.y1 <= height for b in boxes)
        assert figure._supxlabel is None


def test_no_two_columns_have_one_name(studies):
    """Of a run's closing tables, of a dry run's, of a comparison, and of the report's."""
    from jaxmp.pictures import compare
    from jaxmp.training import dry_run
    from jaxmp.training import summary as closing
    from jaxmp.training.experiment import experiment_of

    runs = [
        studies['cpu'].rows['top10'].runs[0],
        studies['mnist_dataparallel'].rows['mean, replicas'].runs[0],
    ]
    links = {
        'processes': 2,
        'interface': 0,
        'moved': [{'boundary': 1, 'payload': [1, 2], 'collectives': [3, 4]}],
    }
    found = [t for run in runs for t in closing.tables({**run, **links})]
    changes = config.default()
    changes.update(fwd='top_k(0.1)', bwd='raw')
    found += [
        dry_run.boundaries(experiment_of(changes)),
        compare.table({'a': runs[0], 'b': runs[1]}),
    ]
    heads = [[str(c.header).strip() for c in table.columns] for table in found]
    for own in [*heads, *tables.HEADS.values()]:
        assert len({*own}) == len(own), own


def test_the_findings_say_what_the_margin_decides(studies):
    """A quantity beside the primary one that a margin of 2 points would not contradict."""
    verdicts = {
        c['id']: v for c, v in zip(PAPER['claims'], claims.judge(studies['cpu']), strict=True)
    }
    assert verdicts['aqsgd'].verdict == verdicts['aqsgd'].evidence[0].verdict == 'supported'
    [harm] = [e for e in verdicts['aqsgd'].evidence if e.verdict == 'contradicted']
    assert harm.points < -2


def test_gaps_are_compared_by_what_is_off(studies):
    """'Closes the gap' is the score off of EF21 less that of Top10 %: 14.9 points in the paper."""
    [claim] = [c for c in PAPER['claims'] if c['id'] == 'ef gap']
    e = claims.weigh(claim['tests'][0], studies['cifar10_small'])
    assert e.points == pytest.approx(54.98 - 49.25)
    assert math.exp(e.paper) == pytest.approx((100 - 90.83) / (100 - 75.89))
    assert e.verdict == 'one seed'


def test_the_gap_of_off_to_on_is_a_ratio_of_errors(studies):
    found = gap.gap([*studies.values()])
    name = next(n for n in found.ratios if n.endswith('(cpu)'))
    off, on = (results.by_seed(studies['cpu'].rows['top10'], mode) for mode in ('off', 'on'))
    last = [r[-1] for r in found.ratios[name]]
    assert last == pytest.approx([(100 - off[s]) / (100 - on[s]) for s in off])
    assert found.steps[name][-1] == studies['cpu'].rows['top10'].runs[0]['steps']
    assert found.paper == (50_000, pytest.approx((100 - 75.89) / (100 - 91.87)))
    assert gap.gap([studies['mnist_dataparallel']]) is None
    name = next(n for n in found.ratios if n.endswith('(converged)'))
    test = json.loads(
        (ROOT / 'results' / 'converged' / 'statistics' / 'top10-s0.json').read_text()
    )['test']
    again = 1 - test['top10-s0, statistics again']['raw']['accuracy']
    want = again / (1 - test['top10-s0']['top_k(0.1)']['accuracy'])
    assert found.again[name] == [pytest.approx(want)]
    assert {n.rpartition(' ')[2] for n in found.again} == {'(converged)', '(moments_batch)'}


def test_two_studies_stand_beside_each_other(studies):
    text = '<!-- verdicts cpu,few_bits_cpu -->\n<!-- /verdicts -->'
    head, _, first = report.renew(text, [*studies.values()]).splitlines()[1:4]
    assert head.split(' | ') == ['| claim', 'cpu', 'few_bits_cpu |']
    assert first.split(' | ')[1] == (
        '**undecided**<br>errors of fw4-bw4 (on) against fw2-bw8 (on): above 0; '
        'is +4.5 % [+0.5 %, +8.8 %]'
    )
    assert first.endswith('(on): above 0; not run: fw4-bw4, fw2-bw8 |')


def test_pictures_say_what_they_were_made_from(studies, tmp_path):
    """A changed number makes another picture; the same data is not drawn again."""
    from study.report import figures

    small = results.Study('x', {n: studies['cifar10_small'].rows[n] for n in ('none', 'top10')})
    [name] = figures.draw(small, tmp_path).values()
    path = tmp_path / name
    first = path.stat().st_mtime_ns
    figures.draw(small, tmp_path)
    assert path.stat().st_mtime_ns == first
    other = json.loads(json.dumps(small.rows['top10'].runs[0]))
    other['test']['on']['last']['accuracy'] += 0.01
    moved = {**small.rows, 'top10': small.rows['top10']._replace(runs=(other,))}
    before = path.read_bytes(), path.with_suffix('.svg').read_bytes()
    figures.draw(results.Study('x', moved), tmp_path)
    after = path.read_bytes(), path.with_suffix('.svg').read_bytes()
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_no_two_names_overlap_and_a_file_is_the_same_each_time(tmp_path):
    """Eight points within a line's height: the extents of all texts are apart and in the axes."""
    from matplotlib.text import Text

    from jaxmp.pictures import labels, style

    said = [style.human(f'uniform({b})', 'uniform(9)') for b in range(1, 9)]
    contents = []
    with style.style():
        for again in ('a', 'b'):
            figure = style.figure(8, 4)
            axes = figure.subplots()
            axes.set(xlim=(0, 1), ylim=(0, 1))
            points = {n: (0.11 * i, 0.5 + 0.01 * (i % 2)) for i, n in enumerate(said)}
            labels.label(figure, axes, points)
            figure.draw_without_rendering()
            boxes = [Text.get_window_extent(t) for t in axes.texts]  # without lines to points
            style.save(figure, tmp_path / f'{again}.png', 'mark')
            contents.append([(tmp_path / f'{again}.{e}').read_bytes() for e in ('png', 'svg')])
    assert len(boxes) == 8
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(b.x1 <= axes.bbox.x1 for b in boxes)
    assert contents[0] == contents[1]
    assert style.holds(tmp_path / 'a.png', 'mark')
    with Image.open(tmp_path / 'a.png') as drawn:
        assert drawn.mode == 'P', 'a byte a pixel, for the few colours of a picture'
    (tmp_path / 'a.svg').unlink()
    assert not style.holds(tmp_path / 'a.png', 'mark')


def test_many_names_stand_beside_the_axes_in_the_order_of_their_points():
    """Numbers count from left to right, and a long name goes on in the next line."""
    from jaxmp.pictures import labels, style

    points = {f'{b} {"long " * 12}'.strip(): (b, 1.0) for b in (3, 1, 2)}
    with style.style():
        figure = style.figure(8, 4)
        axes, key = figure.subplots(1, 2)
        labels.numbered(figure, axes, key, points, dict.fromkeys(points, 'white'))
        figure.draw_without_rendering()
    told = [t.get_text() for t in key.texts]
    assert [t[0] for t in told if t[0] in '123'] == list('112233')
    assert all(len(t) <= labels.WIDTH for t in told)
    assert {t.get_text(): t.xy[0] for t in axes.texts} == {'1': 1, '2': 2, '3': 3}
    assert all(max(t.get_color()) < 1 for t in key.texts)


def test_a_loss_that_diverges_leaves_its_panel_and_an_accuracy_does_not():
    """The axis ends above what the others do; of accuracies it shows all."""
    flat = [np.linspace(2, 1, 5), np.linspace(2.2, 1.5, 5), np.array([2.1, 50, 9e9, 9e9, 9e9])]
    assert epochs.limits(flat, losses=True)[1] < 4
    assert epochs.limits(flat, losses=False)[1] > 9e9


def test_a_picture_of_a_run_shows_scores_by_bytes(studies):
    """On and off with the warm-up shaded; a run without compression is one line, unshaded."""
    for name, lines, shaded in (('aqsgd-top30-warm10', 2, 1), ('none', 1, 0)):
        row = studies['cpu'].rows[name]
        run, records = row.runs[0], []
        for part, scores in run['history'].items():
            kind = {'kind': 'train'} if part == 'train' else {'kind': 'test', 'compression': part}
            found = zip(scores['loss'], scores['accuracy'], strict=True)
            records += [
                {**kind, 'epoch': i, 'loss': l, 'accuracy': a} for i, (l, a) in enumerate(found, 1)
            ]
        loss, test, by_bytes = curves.draw(records, run).axes
        assert [len(axes.lines) for axes in (loss, test, by_bytes)] == [1, lines, lines]
        assert [len(axes.patches) for axes in (loss, test, by_bytes)] == [shaded] * 3
        full = run['steps'] * sum(2 * b['uncompressed'] for b in run['bytes'])
        sent = 1e9 * by_bytes.lines[0].get_xdata()[-1]
        assert sent == pytest.approx(full / results.wire(row)['ratio'])
        np.testing.assert_array_equal(by_bytes.lines[0].get_ydata(), test.lines[0].get_ydata())


def test_a_row_of_phases_is_named_by_all_of_them(studies):
    row = studies['few_bits_converged'].rows['weaned2-4']
    assert captions.names([row]) == ['rotated 2-bit trellis, then 4-bit blocks']


def test_a_title_says_what_the_data_say(studies):
    """The fewest bits among rows with few more errors; without such a row it says so."""
    rows = studies['cifar10_small'].rows
    near = points.points([rows[n] for n in ('none', 'fw4-bw8', 'top10')])
    far = points.points([rows[n] for n in ('none', 'fw4-bw2')])
    assert near.title.startswith('4-bit activations, 8-bit gradients: 6.0 bits per element')
    assert far.title.startswith('No row is within 20 % of the errors')
    assert near.title.endswith('with no compression (one seed), after 2,000 steps')
    alone = studies['few_bits_converged'].rows  # fewer bits, but one seed, are no title
    two = points.points([alone[n] for n in ('none', 'weighed2', 'weighed1')])
    assert two.title.startswith('1.95-bit components, by boundary †: 2.0 bits')
    assert near.caption.startswith('resnet18 on cifar10; n = 1 seed, so no')
    several = points.points([studies['cpu'].rows[n] for n in ('none', 'top10')])
    assert several.caption.startswith('resnet18 on cifar10; n = 3 seeds; bars: 95 % i')


def test_a_title_compares_a_network_with_itself(studies):
    """One with embeddings at every stage is better without compression too."""
    rows = studies['few_bits_text'].rows
    data = points.points([rows[n] for n in ('none', 'embedded', 'embedded32-triples3')])
    e = results.difference(rows['embedded32-triples3'], rows['embedded'])
    assert f'\n{e.mean:+.2f} [{e.low:+.2f}, {e.high:+.2f}] nats' in data.title
    assert e.mean > 5 * results.difference(rows['embedded32-triples3'], rows['none']).mean
    assert data.title.partition(':')[0].endswith('32 learned channels, tokens at every stage')
    assert captions.reference([*rows.values()]) is rows['none']


def test_the_picture_of_mnist_has_rows_of_two_studies(studies):
    """All rows that it names were run, of the paper's channels and of others, in one setting."""
    picture, *_ = figures.across(list(studies.values()))
    rows = {n: studies[study].rows[n] for study, ns in figures.HEADLINE.items() for n in ns}
    assert len(picture.data.rows) == len(rows) == 13
    drawn = sorted(r['y'] for r in picture.data.rows.values())
    errors = sorted(100 - results.last(row, row.judged).mean for row in rows.values())
    np.testing.assert_allclose(drawn, errors)
    own = dict.fromkeys(('name', 'fwd', 'bwd', 'seed', 'phases'))
    runs = [r for row in rows.values() for r in row.runs]
    assert len({json.dumps(r['config'] | own) for r in runs}) == 1
    findings = (ROOT / 'docs' / 'findings.md').read_text()
    assert f'report/{picture.file}'.replace('png', 'svg') in findings


def test_a_row_of_gradients_alone_is_not_the_reference():
    """It has the colour of its backward channel; nor is a model that something helps."""
    helped = {'embed_every_stage': True}
    channels = [('raw', 'top_k(0.1)', {}), ('raw', 'raw', helped), ('raw', 'raw', {})]
    channels.append(('block(4)', 'raw', {}))
    run = lambda fwd, bwd, model: {'fwd': fwd, 'bwd': bwd, 'config': {'model': model}}
    rows = [SimpleNamespace(runs=[run(*row)]) for row in channels]
    assert captions.reference(rows) is rows[2]
    assert [captions.text_of(row) for row in rows] == ['top_k(0.1)', 'raw', 'raw', 'block(4)']


def test_curves_by_epoch_or_by_step():
    """Tests within an epoch stand at their steps; those that end epochs at the epochs."""
    history = lambda *steps: {'off': {'step': list(steps)}}
    assert epochs.every({'history': history(10, 20, 30), 'config': {'epochs': 1}}) == 10
    assert epochs.every({'history': history(60, 120), 'config': {'epochs': 2}}) == 0
    assert epochs.every({'history': {'off': {}}, 'config': {'epochs': 2}}) == 0
