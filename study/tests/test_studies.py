"""The paper's tables as a study: its rows, and the report of what they end in."""

import ast
import hashlib
import json
import pathlib
import re
import shutil

import pytest

from jaxmp import spec
from jaxmp.sweep import runner, study
from jaxmp.training.evaluation import crosstest
from study.report import claims, figures, page, results, tables
from study.report import command as report
from tests.base import ROOT
from tests.test_pretrained import tiny
from tests.test_sweep import plan, process

TWO_A_TABLE = (
    'none,fw4-bw8,top10,ef21-top10-warm20,aqsgd-top50-warm10,gpt2-none,gpt2-top10'  # of five tables
)


@pytest.fixture(scope='module')
def smoke(tmp_path_factory):
    """Two rows of every table, one seed, embedded data; then the report."""
    home = tmp_path_factory.mktemp('smoke')
    assert process(home, '--tables=1,2,3,4,5', f'--rows={TWO_A_TABLE}', '--keep').wait(600) == 0
    report.main([str(home / 'results'), f'--out={home / "report"}'])
    return home


@pytest.mark.slow
def test_the_smoke_study_runs_and_is_reported(smoke):
    results = {p.stem for p in (smoke / 'results' / 'smoke').glob('*.json')}
    assert results == {f'{row}-s0' for row in TWO_A_TABLE.split(',')}
    text = (smoke / 'report' / 'report.md').read_text()
    for table in range(1, 6):
        part = text.split(f'### Table {table}')[1].split('###')[0]
        ran = [l for l in part.splitlines() if l.endswith('| 1 |')]
        assert len(ran) == 2, part
        assert (smoke / 'report' / f'smoke_figure{table + 1}.png').exists()
    page = (smoke / 'report' / 'report.html').read_text()
    assert page.count('src="data:image/png;base64,') == page.count('<img') == 8
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert (smoke / 'report' / 'smoke.csv').read_text().count('\n') == 1 + len(results)


@pytest.mark.slow
def test_a_kept_run_can_be_evaluated(smoke, capsys):
    crosstest.main([str(smoke / 'work' / 'smoke' / 'top10-s0'), '--batchnorm'])
    assert 'statistics again' in capsys.readouterr().out


@pytest.mark.slow
def test_a_finished_study_is_not_run_again(smoke, capsys):
    before = {p: p.stat().st_mtime_ns for p in (smoke / 'results').rglob('*.json')}
    jobs = plan(smoke, '--tables=1,2,3,4,5', f'--rows={TWO_A_TABLE}')
    assert runner.sweep(jobs) == {}
    assert before == {p: p.stat().st_mtime_ns for p in before}
    assert '7 runs, 0 to do' in capsys.readouterr().out


@pytest.mark.slow
def test_a_result_of_other_settings_is_not_taken_for_this_one(smoke):
    jobs = plan(smoke, '--tables=1', '--rows=none', '--seeds=1', '--set', 'optimizer.lr=0.5')
    with pytest.raises(ValueError, match=r'other settings: optimizer.lr=0.02 \(now 0.5\)'):
        runner.sweep(jobs)


@pytest.mark.slow
def test_a_result_from_other_weights_is_not_taken_for_this_one(smoke, tmp_path):
    first, second = (smoke / 'work' / 'smoke' / f'gpt2-{n}-s0' / 'model' for n in ('none', 'top10'))
    start = tmp_path / 'start'
    given = (
        '--tables=5',
        '--rows=gpt2-none',
        '--set',
        'epochs=1',
        '--set',
        f'model.path={start}',
    )
    shutil.copytree(first, start)
    assert runner.sweep(plan(tmp_path, *given)) == {}
    elsewhere = f'model.path={first}'  # the same weights
    assert runner.sweep(plan(tmp_path, *given[:-1], elsewhere)) == {}
    result = json.loads((tmp_path / 'results' / 'smoke' / 'gpt2-none-s0.json').read_text())
    whole = hashlib.sha256((first / 'model.safetensors').read_bytes()).hexdigest()
    assert result['weights'] == whole[:12]
    with pytest.raises(ValueError, match=rf"weights in model.path='{result['weights']}' \(now"):
        runner.sweep(plan(tmp_path, *given[:-1], f'model.path={second}'))


def test_the_report_follows_the_results(tmp_path):
    """A number changed in a result changes in the report."""
    summary = json.loads((ROOT / 'results' / 'cpu' / 'none-s0.json').read_text())
    summary['test']['on']['last']['accuracy'] = 0.123456
    (tmp_path / 'results').mkdir()
    (tmp_path / 'results' / 'none-s0.json').write_text(json.dumps(summary))
    report.main([str(tmp_path / 'results'), f'--out={tmp_path / "report"}'])
    assert '12.35' in (tmp_path / 'report' / 'report.md').read_text()


def test_no_template_of_the_report_holds_a_number():
    for template in (ROOT / 'study' / 'report').glob('*.md'):
        assert not re.search(r'\d', template.read_text()), template
    for module in (claims, figures, page, report, results, tables):
        source = pathlib.Path(str(module.__file__))
        tree = ast.parse(source.read_text())
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        said = [t for t in texts if isinstance(t, str) and '>>>' not in t]
        assert not [t for t in said if re.search(r'\d+\.\d+', t)], source


def test_a_setting_may_have_the_seed_in_it(tmp_path):
    rows = '--tables=5', '--rows=gpt2-none,gpt2-top10', '--scale=converged', '--seeds=2'
    assert {job.config.model.path for job in plan(tmp_path, *rows)} == {'BASE/model'}  # asked for
    jobs = plan(tmp_path, *rows, '--set', 'model.path=BASE-{seed}/model')
    found = {(job.result.stem[-2:], job.config.model.path) for job in jobs}
    assert found == {('s0', 'BASE-0/model'), ('s1', 'BASE-1/model')}


def test_rows_on_which_an_open_verdict_hangs_have_more_seeds():
    def seeds(scale, row):
        found = study.study_of('paper_tables').get_study(scale)
        return [seed for seed, c in found if (c.name, c.seed) == (row, seed)]

    assert seeds('converged', 'top10') == [*range(8)]
    assert seeds('converged', 'top20') == seeds('mnist', 'top10') == [*range(5)]


def test_a_pretrained_model_has_rows_of_its_own():
    found = study.study_of('paper_tables').get_study('pretrained', (5,))
    rows = {c.name: c for seed, c in found if seed == 0}
    assert len(found) == 3 * len(rows)
    assert {'gpt2-none', 'nvfp4', 'best-2.3', 'lora-best-2.3', 'twice-aqsgd-2'} <= {*rows}
    for c in rows.values():
        assert c.data.train_examples * c.epochs * c.data.sequence_length == 102_400
        names = {'examples': c.data.train_examples}
        assert spec.parse(c.fwd, names)
        assert spec.parse(c.bwd, names)
    assert {c.model.train for c in rows.values()} == {'no_table', 'lora(8)'}
    with pytest.raises(ValueError, match='the scale pretrained is of a language model, Table 5'):
        study.study_of('paper_tables').get_study('pretrained', (1,))


def test_a_network_with_slack_has_whole_images():
    """Three seeds of Tables 1 and 2 and a row of blocks of 4 bits."""
    tables = study.study_of('paper_tables')
    found = tables.get_study('slack', (1, 2))
    rows = {c.name for _, c in found}
    assert len(found) == 3 * len(rows)
    assert {'none', 'fw4-bw8', 'top10', 'block4'} <= rows
    assert {(c.data.pool, c.model.width, c.epochs) for _, c in found} == {(1, 32, 30)}
    with pytest.raises(ValueError, match='which the scale slack has not'):
        tables.get_study('slack', (5,))


def test_rows_of_late_gradients_differ_by_what_their_names_say():
    late = study.study_of(str(ROOT / 'configs' / 'late.py'))
    rows = {c.name: c for seed, c in late.get_study('study') if seed == 2}
    assert len(rows) == 4 * (1 + 2 * 2 + 1 + 2) + 2 + 3
    for name, c in rows.items():
        training, delay, *rest = name.removesuffix('-2bit').removesuffix('-stage').split('-')
        assert delay == f'late{c.optimizer.delay}'
        assert [c.optimizer.correction] == (rest or ['none'])
        assert (c.optimizer.name == 'muon') == (training in ('muon', 'untied'))
        assert c.model.tied == (training != 'untied')
        assert (c.model.train == 'lora(8)') == (training == 'lora')
        assert name.endswith('-2bit') == (c.fwd != 'raw') == (c.bwd != 'raw')
        assert name.endswith('-stage') == c.optimizer.delay_by_stage
    assert {c.optimizer.delay for c in rows.values()} == {0, 1, 4}
    rate = lambda n: rows[f'lora-late{n}'].optimizer.lr
    assert (rate(0), rate(1), rate(4)) == (2e-3, 2e-3, 1e-3)  # as tuned, each by itself
    with pytest.raises(ValueError, match=r"no scale 'cpu' .*; there are the scales smoke, study"):
        late.get_study('cpu')
    long = {c.name: c for _, c in late.get_study('long', (1,))}
    assert all(c.data.train_examples == 1024 for c in long.values())
    assert {c.checkpoint_every for c in long.values()} == {'64 steps'}  # a kill loses a quarter
    assert long['lora-late4-predict'].optimizer.lr == long['lora-late0'].optimizer.lr
    assert long['full-late4-predict'].optimizer.warmup == '50%'
    assert long['full-late1-predict'].optimizer.warmup == long['full-late0'].optimizer.warmup
    with pytest.raises(ValueError, match=r"'long' with tables \(2,\); .* of which long has 1"):
        late.get_study('long', (2,))


def test_two_depths_from_nothing_differ_by_their_stages_alone():
    """So that a difference of their losses is one of the number of boundaries."""
    module = study.study_of(str(ROOT / 'configs' / 'from_nothing.py'))
    four, eight = (module.get_study(scale) for scale in ('four', 'eight'))
    assert len(four) == len(module.CHANNELS) * 3
    for (seed, shallow), (_, deep) in zip(four, eight, strict=True):
        assert (seed, shallow.model.stages, deep.model.stages) == (shallow.seed, 4, 8)
        shallow.model.stages = 8
        assert shallow.to_dict() == deep.to_dict()
    with pytest.raises(ValueError, match="no scale 'two'; allowed are four, eight"):
        module.get_study('two')


@pytest.mark.slow
@pytest.mark.parametrize('row', ['muon-late1-predict', 'lora-late4-predict'])
def test_a_row_of_late_gradients_runs(tmp_path, row):
    model = tiny(tmp_path / 'model', num_hidden_layers=4)
    places = f'--out={tmp_path}', f'--work={tmp_path / "work"}', f'--set=model.path={model}'
    table = f'--tables={2 if "muon" in row else 1}'
    words = str(ROOT / 'configs' / 'late.py'), '--scale=smoke', f'--rows={row}', table, *places
    with pytest.raises(SystemExit, match='0'):
        runner.main(words[: -1 if 'muon' in row else None])
    found = json.loads((tmp_path / 'smoke' / f'{row}-s0.json').read_text())
    assert found['steps'] == (4 if 'muon' in row else 8)  # an epoch from nothing, or two
