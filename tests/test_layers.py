"""The order of the rooms: who may import whom, what importing costs, and that all is documented."""

import ast
import importlib
import inspect
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import jaxmp

ROOT = pathlib.Path(jaxmp.__file__).parent
FILES = sorted(p for p in ROOT.rglob('*.py'))

# ../shared/design.md section 4: what a room may import besides itself.
BELOW = {
    'version': '',
    'words': '',
    'defaults': '',
    'wire': 'words',
    'codecs': 'wire words',
    'feedback': 'wire codecs words',
    'spec': 'wire codecs feedback words',
    'transport': 'wire',
    'boundary': 'wire codecs feedback transport',
    'pipeline': 'wire codecs feedback transport boundary',
    'microbatch': 'wire',
    'hlo': '',
    'devices': '',
    'exchange': 'wire codecs feedback transport spec hlo words',
    'runtimes': 'wire feedback transport boundary pipeline microbatch hlo devices exchange',
    'watch': '',
    'rendezvous': 'watch',
    'team': 'devices watch rendezvous',
    'launch': 'rendezvous',
    'files': 'defaults',
    'models': '',
    'data': '',
    'report': 'defaults',
    'hub': '',
}
ABOVE = {  # may import everything below
    'task',
    'setting',
    'training',
    'checkpoint',
    'resume',
    'run',
    'sweep',
    'study',
    'generate',
    '__init__',
}
INSIDE_CODECS = [
    'exact',
    'extremes',
    'select',
    'dense',
    'uniform',
    'logscale',
    'sparse',
    'sign',
    'view',
]
INSIDE_CODECS += ['rotate', 'polarcode', 'polarsearch', 'polar']
HEAVY = (
    'orbax',
    'tensorflow_datasets',
    'transformers',
    'sklearn',
    'matplotlib',
    'tensorboardX',
    'tokenizers',
    'safetensors',
    'huggingface_hub',
)


def room(path):
    parts = path.relative_to(ROOT).with_suffix('').parts
    return parts[0]


def imported(path):
    """Rooms of jaxmp that a file names in any import, also inside functions."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path.name}: imports are absolute'
            inner = [f'{node.module}.{a.name}' for a in node.names]
            names = inner if node.module == 'jaxmp' else [node.module]
        else:
            continue
        rooms |= {n.split('.')[1] for n in names if n.startswith('jaxmp.')}
        if 'jaxmp' in names:
            rooms.add('__init__')
    return rooms


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    name = room(path)
    if name in BELOW:
        assert imported(path) <= {name, *BELOW[name].split()}
    elif name not in ABOVE:
        assert not imported(path) & (ABOVE - {'__init__'}), f'{name} is a tool of the trainer'


def test_there_is_no_cycle():
    order = list(BELOW)
    for name, below in BELOW.items():
        assert all(order.index(other) < order.index(name) for other in below.split())


@pytest.mark.parametrize('name', INSIDE_CODECS)
def test_codecs_import_one_way(name):
    source = ast.parse((ROOT / 'codecs' / f'{name}.py').read_text())
    others = {
        n.module.split('.')[2] if n.module != 'jaxmp.codecs' else n.names[0].name
        for n in ast.walk(source)
        if isinstance(n, ast.ImportFrom) and (n.module or '').startswith('jaxmp.codecs')
    }
    assert others <= set(INSIDE_CODECS[: INSIDE_CODECS.index(name)])


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
    public = 'parse bits boundary local ppermute pipeline value_and_grad Ctx Channel Codec'
    assert set(public.split()) <= set(jaxmp.__all__)
