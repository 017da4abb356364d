"""The pages: every number has a source (numbers.txt), the code runs, the commands are right."""

import ast
import doctest
import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from math import inf

import pytest
import yaml

from jaxmp import __main__ as console
from jaxmp import config
from jaxmp.config import plugins
from jaxmp.config.change import put
from jaxmp.launch.launchers import place_of
from jaxmp.net.address import TOKEN
from jaxmp.study.sweep.study import study_of
from jaxmp.training.command import described
from jaxmp.training.experiment import experiment_of
from jaxmp.training.parallel import parallel_of
from jaxmp.training.trained import trained
from tests import numbers
from tests.runs import ENV, ROOT

NUMBER = r'\d+(?:,\d{3})*(?:\.\d+)?|\.\d+'
UNREAD = (  # the report's tables, which test_report.py makes again; comments; blocks; addresses
    r'<!-- (results|verdicts|nats|claims|bits|codecs|late|schedules)\b[^>]*-->.*?<!-- /\1 -->',
    r'<!-- (depth|texts|law|chosen|learned) -->.*?<!-- /\1 -->',
    r'<!--.*?-->',
    r'```.*?```',
    r'\$\$.*?\$\$|\$[^$]*\$',
    r'(?<=\])\([^)]*\)',
)
NAMES = (  # numbers that belong to a name; code
    r'`[^`]*`',
    r'SmolLM2(-135M)?|Qwen[23]|Gemma [23]( 270M)?|NVFP4|LLM\.int8|all-MiniLM-L6-v2|int8',
    r'ResNet-18|GPT-2|CIFAR-10|cifar10_small|WikiText-2( v1)?|EF21|1F1B|float32|fp16',
    r'Apache-2\.0|CC BY 4\.0',
    r'\b0\.1\d\.\d\b|Python 3\.1\d\b(?! or newer)|CUDA 13|H100',
    r'Tables? \d(-\d)?|Top\d+ %|fw\d-bw\d|(\d to )?\d-bit|largest 10 %|\d+ [GM]bit/s|\d+ cores',
    r'arXiv 2401\.07788|\(2106\.05203\)|\(2206\.01299\)',
    r'\(1905\.13727\)|\(1905\.05957\)|\(0903\.0307\)',
    r'none < 50 < 30 < 20 < 10 <',
)


def read(path):
    """A page in one line, without what is not prose."""
    text = (ROOT / path).read_text()
    for pattern in UNREAD:
        text = re.sub(pattern, '', text, flags=re.DOTALL)
    return re.sub(r'\s+', ' ', text)


def entries(page):
    """Pieces of a page and the expressions of their numbers."""
    text = (ROOT / 'tests' / 'numbers.txt').read_text()
    [part] = [p for p in re.split(r'^== ', text, flags=re.MULTILINE) if p.startswith(page + '\n')]
    return re.findall(r'^(\S.*)\n +(.*)$', part, re.MULTILINE)


def written(value, like):
    """``value`` in the form of the number ``like``."""
    if isinstance(value, str):
        return value
    digits = len(like.partition('.')[2])
    text = f'{value:{"," if "," in like else ""}.{digits}f}'
    return text.removeprefix('0') if like.startswith('.') else text


def faults(text, entries):
    """What is wrong with the numbers of a page, a line each."""
    known, wrong = [False] * len(text), []
    for match in re.finditer('|'.join(NAMES), text):
        known[match.start() : match.end()] = [True] * len(match[0])
    for words, expression in entries:
        values = eval(f'[{expression}]', vars(numbers))
        places = re.escape(words).replace(r'\{\}', rf'({NUMBER}|\b[0-9a-f]{{7}}\b)')
        matches = list(re.finditer(places, text))
        if len(matches) != 1 or len(matches[0].groups()) != len(values):
            wrong.append(f'{len(matches)} times, {len(values)} values: {words}')
            continue
        for i, value in enumerate(values, 1):
            start, end = matches[0].span(i)
            known[start:end] = [True] * (end - start)
            if (is_ := matches[0][i]) != (be := written(value, is_)):
                wrong.append(f'{is_} should be {be}: {words}')
    loose = [m for m in re.finditer(NUMBER, text) if not all(known[m.start() : m.end()])]
    return [*wrong, *(f'no source: {text[max(0, m.start() - 40) : m.end()]}' for m in loose)]


@pytest.mark.parametrize(
    'page',
    [
        'README.md',
        'docs/install.md',
        'docs/results.md',
        'docs/findings.md',
        'docs/paper.md',
        'docs/speed.md',
        'docs/finetune.md',
        'docs/late.md',
        'docs/depth.md',
    ],
)
def test_every_number_of_a_page_has_a_source(page):
    assert faults(read(page), entries(page)) == []


def test_every_number_of_the_advice_has_a_source():
    """test_bench.py has the numbers of the planner, whose parts stand in between."""
    page = 'docs/choosing.md'
    advice, planner, exchanges = re.split(r'(?=## Does a further|## Gradients bet)', read(page))
    assert 'jaxmp plan' in planner
    assert faults(advice + exchanges, entries(page)) == []


def test_a_number_without_a_source_or_of_another_value_is_found():
    entries = [('takes {} ms', '1234.56')]
    assert faults('ResNet-18 takes 1,235 ms.', entries) == []
    assert faults('ResNet-18 takes 1,236 ms.', entries) == ['1,236 should be 1,235: takes {} ms']
    assert faults('It takes 1,235 ms, or 7.', entries) == ['no source: It takes 1,235 ms, or 7']
    assert faults('It takes a second.', entries) == ['0 times, 1 values: takes {} ms']


LOGS = 'LOG.md', 'changelog.md'  # grow with each change


def test_no_page_is_long():
    """In words, tables and code counted; a page that grows loses a paragraph or is split."""
    words = {p.name: len(p.read_text().split()) for p in (ROOT / 'docs').glob('*.md')}
    assert len((ROOT / 'README.md').read_text().split()) <= 600
    assert words['findings.md'] <= 1500
    assert len(read('docs/late.md').split()) <= 700  # beside its tables
    assert len(read('docs/depth.md').split()) <= 900  # beside its tables
    most = {'paper.md': 3000, 'depth.md': inf} | dict.fromkeys(LOGS, inf)
    assert {n: w for n, w in words.items() if w > most.get(n, 1800)} == {}


def test_the_paper_lists_what_it_cites():
    """By arXiv number; two that nobody has read in full are linked and not listed."""
    text, references = (ROOT / 'docs' / 'paper.md').read_text().split('## References')
    listed = re.findall(r'arXiv:(\d+\.\d+)', references)
    cited = set(re.findall(r'arxiv\.org/abs/(\d+\.\d+)', text))
    assert len(listed) == len(set(listed))
    assert cited - set(listed) == {'2010.05625', '2606.05484'}
    assert set(listed) <= cited


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
    assert runs == [command, f'{command} -m slow']
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
    c = config.complete(plugins.load(given.pop('config', 'digits_resnet')))
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
