"""The pages: the code runs, the commands are right, links lead to files."""

import ast
import doctest
import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml

from jaxmp import __main__ as console
from jaxmp import config, plugins
from jaxmp.config import files
from jaxmp.config.change import put
from jaxmp.launch.launchers import place_of
from jaxmp.net.address import TOKEN
from jaxmp.sweep.study import study_of
from jaxmp.training.command import described
from jaxmp.training.experiment import experiment_of
from jaxmp.training.parallel import parallel_of
from jaxmp.training.tasks.trained import trained
from tests.base import ENV, ROOT


def test_every_row_of_a_table_stands_in_one():
    """Two rows and a rule at least: a row by itself is shown as text."""
    pages = [ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')]
    for path in pages:
        text = re.sub(r'```.*?```', '', path.read_text(), flags=re.DOTALL)
        for block in re.findall(r'(?:^\|.*\n?)+', text, re.MULTILINE):
            assert re.match(r'\|.*\n\|[-:|]+\|\n\|', block), f'{path.name}: {block[:80]}'


@pytest.mark.parametrize('name', ['digits_resnet', 'digits_resnet_nvfp4'])
def test_the_first_run_shows_what_its_commands_ended_in(name):
    summary = json.loads((ROOT / f'bench/results/commands/{name}.json').read_text())
    scores = [f'{summary["test"][way]["last"]["accuracy"]:.2%}' for way in ('off', 'on')]
    loss = f'{summary["history"]["train"]["loss"][-1]:.4f}'
    row = r' +'.join(map(re.escape, ['15 epochs', 'accuracy', *scores, loss]))
    channels = re.escape(f'fwd {summary["fwd"]}, bwd {summary["bwd"]}')
    page = (ROOT / 'docs' / 'first_run.md').read_text()
    assert re.search(rf'runs/digits_resnet-\S+, +{row} .*\n +{channels}\n', page)


def test_what_is_built_is_no_part_of_the_repository():
    ignored = {*(ROOT / '.gitignore').read_text().split()}
    assert {'site/', 'build/', '/runs/'} <= ignored
    assert 'runs/' not in ignored, 'results/bench/runs are results'


def test_ci_runs_the_tests_as_the_readme_and_contributing_say():
    lines = (ROOT / '.ci' / 'run').read_text().splitlines()
    runs = [line for line in lines if line.startswith('python -m pytest')]
    [command] = re.findall(r'python -m pytest[^`]*', (ROOT / 'README.md').read_text())
    assert runs == [command, f'{command} -m slow', f"{command} -m '' study"]
    assert all(f'| `{run}` |' in (ROOT / 'CONTRIBUTING.md').read_text() for run in runs)


def test_a_push_runs_ci_and_a_commit_its_quick_checks():
    workflow = yaml.safe_load((ROOT / '.github' / 'workflows' / 'ci.yml').read_text())
    [job] = workflow['jobs'].values()
    assert [step['run'] for step in job['steps'] if 'run' in step] == ['bash .ci/run']
    named = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['classifiers']
    versions = {name.rpartition(' ')[2] for name in named if 'Python :: 3.' in name}
    assert versions == {*job['strategy']['matrix']['python']}
    hooks = yaml.safe_load((ROOT / '.pre-commit-config.yaml').read_text())['repos'][0]['hooks']
    gate = (ROOT / '.ci' / 'run').read_text()
    entries = [hook['entry'].removesuffix(' --force-exclude') for hook in hooks]
    assert entries == ['ruff format', 'ruff check', 'pyright']
    assert all(re.search(rf'^{entry}\b', gate, re.MULTILINE) for entry in entries)


AT_ROOT = [ROOT / f'{name}.md' for name in ('README', 'CONTRIBUTING', 'SECURITY')]
PAGES = [*AT_ROOT, *sorted((ROOT / 'docs').glob('*.md'))]
BLOCK = re.compile(r'^```(python|pycon|sh)(?: title="(\S+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
CODED = [p for p in PAGES if BLOCK.search(p.read_text()) and p.name != 'nnx.md']  # test_nnx.py


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_a_link_leads_to_a_file_of_the_repository(page):
    text = re.sub(r'```.*?```|`[^`\n]*`', '', page.read_text(), flags=re.DOTALL)
    links = re.findall(r'\]\((?!https?:|#)([^)#\s]+)', text)
    assert not [a for a in links if not (page.parent / a).exists()]


def commands(text):
    """The commands of jaxmp in a block of shell, as arguments; what launches them is one too."""
    for line in text.replace('\\\n', ' ').splitlines():
        words = shlex.split(line, comments=True)
        ends = [-1, *(i for i, w in enumerate(words) if w in ('&&', '--')), len(words)]
        for a, b in itertools.pairwise(ends):
            part = words[a + 1 : b]
            if part[:2] == ['python', 'train.py']:
                yield ['train', *part[2:]]
            elif part[:1] == ['jaxmp']:
                yield part[1:]


def check_commands(text, capsys):
    for words in commands(text):
        check_command(words, capsys)


def check_command(words, capsys):
    """A command exists, and so do its flags; of a training also keys and values, the parts too."""
    name, *rest = words
    flags = {w.partition('=')[0] for w in rest if w.startswith('-') and '--config' not in w}
    if name == 'train':
        text = described('digits_resnet').replace('dry_run', 'dry-run')
        check_training(rest)
    else:
        assert name in console.COMMANDS
        with pytest.raises(SystemExit):
            console.main([name, '--help'])
        text = capsys.readouterr().out
    assert [f for f in flags if not re.search(rf'{f}\b', text)] == [], words
    if name == 'sweep':
        scale = next(w.partition('=')[2] for w in rest if w.startswith('--scale'))
        assert study_of(rest[0]).get_study(scale)


EXAMPLES = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / 'examples').glob('*.yaml')
}


def test_the_examples_say_what_to_give_them():
    """In the comment that each begins with; the page on running names both."""
    page = (ROOT / 'docs' / 'running.md').read_text()
    assert {*EXAMPLES} == {'jobset', 'skypilot'}
    for name in EXAMPLES:
        assert (ROOT / 'examples' / f'{name}.yaml').read_text().count(f'examples/{name}.yaml') == 1
        assert f'../examples/{name}.yaml' in page


def test_a_jobset_starts_a_run_of_as_many_processes_as_pods(capsys):
    """Its command is one of ours, and its variables the place of each pod."""
    jobs, name = EXAMPLES['jobset']['spec'], EXAMPLES['jobset']['metadata']['name']
    [job] = jobs['replicatedJobs']
    pods = job['template']['spec']
    [container] = pods['template']['spec']['containers']
    env = {e['name']: e.get('value', '1') for e in container['env']}
    assert place_of(env) == (f'{name}-{job["name"]}-0-0.{name}:9876', pods['completions'], 1)
    assert pods['completions'] == pods['parallelism']
    assert TOKEN in env
    check_command(container['command'][1:], capsys)
    c = trained_by(container['command'][2:])
    parallel = parallel_of(c, c.model.stages)
    assert parallel.joined
    assert (
        parallel.devices(pods['completions']) == container['resources']['limits']['nvidia.com/gpu']
    )


def test_skypilot_starts_a_run_of_its_nodes(capsys):
    task = EXAMPLES['skypilot']
    assert task['secrets'] == {TOKEN: None}
    [words] = commands(task['run'])
    check_command(words, capsys)
    c = trained_by(words[1:])
    assert task['num_nodes'] <= len(parallel_of(c, c.model.stages).parts())


def trained_by(words):
    """The configuration of a training with such flags."""
    given = dict(w.removeprefix('--').partition('=')[::2] for w in words)
    c = config.complete(files.load(given.pop('config', 'digits_resnet')))
    for key in [k for k in given if k.startswith('config.')]:
        put(c, f'{key.removeprefix("config.")}={given[key]}')
    return c


def check_training(words):
    c = trained_by(words)
    if c.data.dir == 'DIR' or c.model.path.startswith('HuggingFaceTB/'):  # files that nobody has
        config.check(c)
        trained(c.model.train)
    else:
        experiment_of(c)


@pytest.mark.slow
@pytest.mark.parametrize('page', CODED, ids=lambda p: p.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    """Blocks with a title are files of the folder in which the others run, one after another."""
    blocks = BLOCK.findall(page.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _, title, code in blocks:
        if title:
            (tmp_path / title).write_text(code)
            monkeypatch.delitem(sys.modules, title.removesuffix('.py'), raising=False)
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    names = {'__name__': page.stem}
    for kind, title, code in blocks:
        if kind == 'python' and not title:
            exec(compile(code, page.name, 'exec', dont_inherit=True), names)
        elif kind == 'pycon':
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), 0)
            assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0
        elif kind == 'sh':
            check_commands(code, capsys)


# Trainings as short as in .ci/commands, and of a network that compiles in half the time.
FEW = ('--config.epochs=1', '--config.data.train_examples=128', '--config.data.test_examples=128')
OWN = [  # commands that use the files of their page
    (page, line)
    for page in CODED
    for kind, _, code in BLOCK.findall(page.read_text())
    if kind == 'sh'
    for line in code.replace('\\\n', ' ').splitlines()
    if re.match(r'jaxmp (train|codecs) ', line)
    and any(title and title in line for _, title, _ in BLOCK.findall(page.read_text()))
]


@pytest.mark.slow
@pytest.mark.parametrize(('page', 'line'), OWN, ids=lambda of: getattr(of, 'stem', None))
def test_a_command_of_a_page_runs_with_the_files_of_the_page(page, line, tmp_path):
    """As a user would: printed to the end, and ended with 0."""
    for _, title, code in BLOCK.findall(page.read_text()):
        if title:
            (tmp_path / title).write_text(code)
    words = shlex.split(line)[1:]
    if words[0] == 'train':
        words += FEW if 'model.name' in line else [*FEW, '--config.model.name=lenet']
    done = subprocess.run(
        [sys.executable, '-m', 'jaxmp', *words],
        cwd=tmp_path, env=ENV, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert words[0] == 'codecs' or 'bytes per step' in done.stdout + done.stderr


def test_formulas_and_doctests_of_docstrings_become_those_of_a_page():
    """As `docs/docstrings.py` and `docs/mathml.py` make them, whose packages are those of docs."""
    pytest.importorskip('griffe')
    pytest.importorskip('latex2mathml')
    docs = [plugins.module(ROOT / 'docs' / f'{name}.py') for name in ('docstrings', 'mathml')]
    formulas = []
    for path in (ROOT / 'jaxmp').rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = docs[0].markdown(ast.get_docstring(node) or '')
                assert not re.search(r'^ *\.\. \w|:\w+:`', text, re.MULTILINE), path
                formulas += re.findall(r'^\$\$\n(.*?)\n\$\$$', text, re.MULTILINE | re.DOTALL)
    assert len(formulas) > 15
    for formula in formulas:
        made = docs[1].mathml(formula, 'block')
        assert re.fullmatch(r'<div class="formula">(<math[^$]*</math>)+</div>', made, re.DOTALL)


@pytest.mark.parametrize(
    'line',
    [
        'jaxmp trian',
        'jaxmp train --config.widht=8',
        'jaxmp train --config.epochs=many',
        "jaxmp train --config.fwd='topk(0.1)'",
        'jaxmp train --config=digits_dataparallel --config.exchange=nothing --dry-run',
        'jaxmp launch --processes 2 -- jaxmp train --dry-runs',
        'jaxmp compare runs/* --into x',
        'jaxmp sweep paper_tables --scale=none',
    ],
)
def test_a_command_that_is_wrong_is_found(line, capsys):
    with pytest.raises((AssertionError, ValueError, KeyError, SystemExit)):
        check_commands(line, capsys)
