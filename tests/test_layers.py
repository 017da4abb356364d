"""The order of the rooms: who may import whom, what importing costs, and that all is documented."""

import ast
import graphlib
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

import jaxmp
from jaxmp.config import KEYS

ROOT = pathlib.Path(jaxmp.__file__).parent
FILES = sorted(p for p in ROOT.rglob('*.py'))
PARTS = {path: path.relative_to(ROOT.parent).with_suffix('').parts for path in FILES}
MODULES = {'.'.join(parts).removesuffix('.__init__'): path for path, parts in PARTS.items()}

# What a room may import besides itself.
BELOW = {
    'terminal': '',
    'plugins': '',
    'config': 'terminal plugins',
    'metrics': '',
    'wire': '',
    'codecs': 'wire',
    'feedback': 'wire codecs',
    'spec': 'terminal wire codecs feedback',
    'testing': 'wire feedback spec',
    'boundary': 'wire codecs feedback',
    'lax': 'wire feedback boundary spec',
    'nnx': 'wire boundary',
    'net': 'terminal',
    'exchange': 'wire codecs feedback boundary spec',
    'contrib': 'wire codecs feedback exchange',
    'grammar': 'wire codecs feedback spec exchange contrib plugins',
    'codecs.__main__': 'grammar',  # an entry point; nothing imports one
    'launch': 'terminal net',
    'runtimes': 'wire feedback boundary net exchange',
    'data': 'terminal',
    'models': 'terminal data',
    'pictures': 'terminal config metrics',
}
# These may import everything of the table, and those before them.
ABOVE = 'training', 'plan', 'sweep', '__main__', '__init__'
INSIDE_CODECS = [
    'exact',
    'extremes',
    'select',
    'dense',
    'uniform',
    'logscale',
    'indices',
    'sparse',
    'sign',
    'view',
]
INSIDE_CODECS += [
    'rans',
    'rows',
    'components',
    'fitted',
    'rotate',
    'polarcode',
    'polarsearch',
    'polar',
    'microscaling',
    'spikes',
]
HEAVY = (
    'flax.nnx',
    'orbax',
    'tensorflow_datasets',
    'transformers',
    'datasets',
    'gguf',
    'jinja2',
    'sklearn',
    'matplotlib',
    'tensorboardX',
    'wandb',
    'tokenizers',
    'safetensors',
    'huggingface_hub',
)


def room(path):
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts) if '.'.join(parts) in BELOW else parts[0]


def names(path):
    """All that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path.name}: imports are absolute'
            inner = [f'{node.module}.{a.name}' for a in node.names]
            yield from inner if node.module == 'jaxmp' else [node.module]


def imported(path):
    """Rooms of jaxmp that a file imports."""
    found = [n.split('.') for n in names(path) if n.partition('.')[0] == 'jaxmp']
    assert not any('__main__' in n for n in found), f'{path.name} imports an entry point'
    return {n[1] if n[1:] else '__init__' for n in found}


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    name = room(path)
    if name in BELOW:
        assert imported(path) <= {name, *BELOW[name].split()}
    elif name != '__init__':  # which gives the trainer's names to those who ask for them
        later = ABOVE[ABOVE.index(name) + 1 :]
        assert not imported(path) & {*later} - {'__init__'}


def test_there_is_no_cycle():
    order = list(BELOW)
    for name, below in BELOW.items():
        assert all(order.index(other) < order.index(name) for other in below.split())


def needed(path):
    """Modules of jaxmp that a file imports, also inside functions; not those of types alone."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    guards = [n for n in nodes if isinstance(n, ast.If) and ast.unparse(n.test) == 'TYPE_CHECKING']
    typing = {id(n) for guard in guards for n in ast.walk(guard)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and id(node) not in typing:
            inner = (f'{node.module}.{a.name}' for a in node.names)
            yield from (name if name in MODULES else node.module for name in inner)


INSIDE_TRAINING = 'workdir', 'tasks', '', 'evaluation', 'generation', 'elastic'  # from below


@pytest.mark.parametrize('folder', INSIDE_TRAINING)
def test_the_folders_of_training_import_downwards(folder):
    """The command alone knows all: it begins an elastic run."""
    above = INSIDE_TRAINING[INSIDE_TRAINING.index(folder) + 1 :]
    for path in (ROOT / 'training' / folder).glob('*.py'):
        if path.name != 'command.py':
            names = [n.split('.') for n in needed(path) if n.startswith('jaxmp.training.')]
            folders = {n[2] if n[2] in INSIDE_TRAINING else '' for n in names}
            assert not folders & {*above}, path.name


def test_no_modules_import_each_other_in_a_circle():
    order = graphlib.TopologicalSorter({name: needed(path) for name, path in MODULES.items()})
    order.prepare()  # CycleError has the modules of a circle


@pytest.mark.parametrize('name', INSIDE_CODECS)
def test_codecs_import_one_way(name):
    source = ast.parse((ROOT / 'codecs' / f'{name}.py').read_text())
    others = {
        n.module.split('.')[2] if n.module != 'jaxmp.codecs' else n.names[0].name
        for n in ast.walk(source)
        if isinstance(n, ast.ImportFrom) and (n.module or '').startswith('jaxmp.codecs')
    }
    assert others <= set(INSIDE_CODECS[: INSIDE_CODECS.index(name)])


def asks_the_runtime(node):
    """Whether a node compares, matches or looks up what ``config.parallel.runtime`` says."""
    named = lambda n: (
        isinstance(n, ast.Attribute | ast.Name) and 'runtime' in ast.unparse(n).split('.')
    )
    said = lambda n: isinstance(n, ast.Constant) and n.value in KEYS['parallel.runtime'].words
    if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is):
        return any(named(n) or said(n) for n in (node.left, *node.comparators))
    if isinstance(node, ast.Match):
        return named(node.subject)
    return isinstance(node, ast.Subscript) and (named(node.slice) or said(node.slice))


def test_one_module_knows_the_names_of_the_runtimes():
    found = {
        f'{path.relative_to(ROOT)}:{node.lineno}'
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if asks_the_runtime(node)
    }
    assert {name.partition(':')[0] for name in found} == {'training/parallel.py'}, sorted(found)


def test_import_is_light():
    code = f'import sys, jaxmp; print(*(m for m in {HEAVY} if m in sys.modules))'
    done = subprocess.run(
        [sys.executable, '-W', 'error', '-c', code],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ''), done.stdout + done.stderr


def modules():
    found = pkgutil.walk_packages([str(ROOT)], 'jaxmp.')
    return ['jaxmp', *(m.name for m in found)]


@pytest.mark.parametrize('name', modules())
def test_public_names_are_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__, f'{name} has no docstring'
    for word, thing in vars(module).items():
        own = getattr(thing, '__module__', None) == name
        if word.startswith('_') or not own:
            continue
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert inspect.getdoc(thing), f'{name}.{word} has no docstring'
            assert not (thing.__doc__ or '').startswith(f'{word}('), f'{name}.{word}: generated'
        if inspect.isclass(thing):
            for method, f in vars(thing).items():
                if not method.startswith('_') and inspect.isfunction(f):
                    assert f.__doc__, f'{name}.{word}.{method} has no docstring'


def test_all_lists_what_is_there():
    for name in ('jaxmp', 'jaxmp.codecs'):
        module = importlib.import_module(name)
        assert all(hasattr(module, word) for word in module.__all__)
        assert len(set(module.__all__)) == len(module.__all__)
    public = 'parse bits boundary pipeline value_and_grad Ctx Channel Codec'
    assert set(public.split()) <= set(jaxmp.__all__)


UNDECLARED = {'importlib-resources'}  # tensorflow-datasets imports them


def test_every_dependency_is_imported_where_the_page_says():
    """The table of docs/install.md has a line per dependency, with its rooms if they are few."""
    project = tomllib.loads((ROOT.parent / 'pyproject.toml').read_text())['project']
    train = project['optional-dependencies']['train']
    declared = {re.match(r'[\w-]+', line)[0] for line in (*project['dependencies'], *train)}
    rooms = {package: set() for package in declared}
    owners = metadata.packages_distributions()
    for path in FILES:
        for name in {n.partition('.')[0] for n in names(path)}:
            for package in owners.get(name, ()):
                rooms.setdefault(package.lower().replace('_', '-'), set()).add(room(path))
    page = (ROOT.parent / 'docs' / 'install.md').read_text()
    rows = dict(re.findall(r'^\| `([\w-]+)` \| (.*?) \|', page, re.MULTILINE))
    said = {package: set(re.findall(r'`(\w+)`', where)) for package, where in rows.items()}
    few = {package: rooms[package] if len(rooms[package]) < 8 else set() for package in declared}
    assert said == few
    assert {package for package in declared if not rooms[package]} == UNDECLARED
    tfds = metadata.distribution('tensorflow-datasets')
    needs = ' '.join(line for line in tfds.requires if ';' not in line).lower()
    assert not any(package in needs.replace('_', '-') for package in UNDECLARED)
