"""The base install: programs of one's own run without the trainer's packages; commands say so."""

import re
import subprocess
import sys

import pytest

from jaxmp.__main__ import COMMANDS, TRAIN
from tests.base import ENV, ROOT

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({names}))
"""
OF_FLAX = {'flax', 'orbax', 'rich'}  # that, and what it brings
BLOCK = re.compile(r'^```python(?: title="([\w.]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def ran(folder, code, names=TRAIN):
    """A program in a folder, in which packages cannot be imported."""
    return subprocess.run(
        [sys.executable, '-c', WITHOUT.format(names=sorted(names)) + code],
        cwd=folder, env=ENV, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    'page', ['README', 'docs/own_codec', 'docs/own_collectives', 'docs/own_loop', 'docs/nnx']
)
def test_a_page_needs_no_more_than_the_base(page, tmp_path):
    """Two show Flax modules as well, and one at its end the runtimes, which are the trainer's."""
    blocks = BLOCK.findall((ROOT / f'{page}.md').read_text())
    for title, code in blocks:
        if title:
            (tmp_path / title).write_text(code)
    code = '\n'.join(code for title, code in blocks if not title and 'jaxmp.runtimes' not in code)
    done = ran(tmp_path, code, TRAIN - OF_FLAX if 'flax' in code else TRAIN)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize('command', COMMANDS)
def test_a_command_says_what_to_install(command, tmp_path):
    done = ran(tmp_path, f'from jaxmp.__main__ import main\nmain([{command!r}, "--help"])')
    if command == 'codecs':
        assert done.returncode == 0, done.stderr
    else:
        line = rf"jaxmp {command} needs \w+, of the extra train: pip install 'jaxmp\[train\]'\n"
        assert re.fullmatch(line, done.stderr), done.stderr


def test_each_package_of_the_extra_is_named():
    """Those that a project says, by the names under which they are imported."""
    import tomllib

    extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    said = {re.match(r'[\w-]+', line)[0] for line in extras['optional-dependencies']['train']}
    by_import = {'orbax-checkpoint': 'orbax', 'pillow': 'PIL', 'pyzmq': 'zmq'}
    known = {by_import.get(name, name.replace('-', '_')) for name in said}
    assert known - {'absl_py', 'importlib_resources'} == TRAIN  # optax brings absl
