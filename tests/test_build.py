"""The archive and the wheel are whole: built from the clone, installed elsewhere, offline."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from jaxmp import __version__
from jaxmp.config import files
from jaxmp.runtimes import compiler
from tests.base import ROOT

PIP = '-m', 'pip', '--disable-pip-version-check', '--no-input'
USED = """
import importlib.metadata, json
import jaxmp
from jaxmp import data
from jaxmp.config import files
from jaxmp.grammar import sinks
from jaxmp.data import text
about = importlib.metadata.metadata('jaxmp')
print(json.dumps({
    'file': jaxmp.__file__, 'version': about['Version'],
    'licences': about.get_all('License-File'),
    'configurations': [path.stem for path in files.files()],
    'read': [len(data.load('digits').train.y), len(text.alice().train[0]), sinks.sample().size],
    'named': files.load('finetune').name,
}))
"""


def python(*words, path=None, cwd=ROOT):
    """What Python prints, in a folder and with a path of its own."""
    env = os.environ | {'PYTHONDONTWRITEBYTECODE': '1', 'JAX_PLATFORMS': 'cpu'}
    env |= {'PYTHONPATH': str(path)} if path else {}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=env, cwd=cwd, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """The folder of a wheel that was built from the archive, and so of what the archive has."""
    folder = tmp_path_factory.mktemp('built')
    python('-m', 'hatchling', 'build', '-t', 'sdist', '-d', folder)
    [archive] = folder.glob('*.tar.gz')
    offline = '--no-index', '--no-deps'
    python(*PIP, 'wheel', *offline, '--no-build-isolation', '-w', folder, archive)
    [wheel] = folder.glob('*.whl')
    python(*PIP, 'install', *offline, '--target', folder / 'site', wheel)
    return folder / 'site'


def test_a_jax_that_sums_wrong_rows_is_refused_and_not_installed(monkeypatch):
    """The right value here; a wrong one, as of jax 0.10.2, in a line; and no such jax from pip."""
    compiler.check_compiler.cache_clear()
    compiler.check_compiler()
    right = compiler.jnp.sum
    monkeypatch.setattr(compiler.jnp, 'sum', lambda x: right(x) * 0.99)
    compiler.check_compiler.cache_clear()
    with pytest.raises(ValueError, match=r'computes 39,999 of 40,000 sums wrongly on .*"jax==0'):
        compiler.check_compiler()
    about = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    extras = [about['optional-dependencies'][f'cuda{n}'][0] for n in (12, 13)]
    [plain] = [d for d in about['dependencies'] if re.match(r'jax\b(?!typing)', d)]
    for needed in (plain, *extras):
        allowed = Requirement(needed).specifier
        tried = ('0.10.1', '0.10.2', '0.11.0', '0.11.1', '0.11.2', '0.11.3')
        assert [v for v in tried if v in allowed] == ['0.10.1', '0.11.2']


@pytest.mark.slow
def test_the_installed_wheel_has_code_data_configurations_and_licences(installed, tmp_path):
    found = json.loads(python('-c', USED, path=installed, cwd=tmp_path))
    assert found['file'] == str(installed / 'jaxmp' / '__init__.py')
    assert found['version'] == __version__
    assert {'digits.NOTICE', 'LICENSE'} <= {n.rpartition('/')[2] for n in found['licences']}
    assert found['configurations'] == [path.stem for path in files.files()]
    assert found['read'] == [1437, 125802, 48 * 576]
    assert found['named'] == 'finetune'


@pytest.mark.slow
def test_the_installed_wheel_has_every_file_of_the_package(installed):
    files = lambda root: {
        str(path.relative_to(root)) for path in root.rglob('*')
        if path.is_file() and '__pycache__' not in path.parts
    }  # fmt: skip
    assert files(installed / 'jaxmp') - files(ROOT / 'jaxmp') == {
        f'configs/{path.name}' for path in (ROOT / 'configs').glob('*.py')
    }
    assert files(ROOT / 'jaxmp') - files(installed / 'jaxmp') == set()


@pytest.mark.slow
def test_the_installed_command_runs(installed, tmp_path):
    command = installed / 'bin' / 'jaxmp'
    assert python(command, '--version', path=installed, cwd=tmp_path) == f'jaxmp {__version__}\n'


def test_every_page_says_this_version():
    cited = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    newest = re.search(r'^## (\S+)', (ROOT / 'docs/changelog.md').read_text(), re.MULTILINE)
    bibtex = re.search(r'\{version (\S+);', (ROOT / 'docs/findings.md').read_text())
    assert {cited['version'], newest[1].rstrip(','), bibtex[1]} == {__version__}
