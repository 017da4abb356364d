"""The files of configurations: the package's own, by name, and one's own, by path."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections

from jaxmp.plugins import module

DEFAULT = 'digits_resnet'
PLAIN = 'common'  # for an own model or data set: all defaults, nothing of the digits


def folder() -> Path:
    """Where the package's own configurations are: in a clone beside it, installed within it."""
    package = Path(__file__).parents[1]
    inside = package / 'configs'
    return inside if inside.is_dir() else package.parent / 'configs'


def files() -> list[Path]:
    """The package's own configurations."""
    return [p for p in sorted(folder().glob('*.py')) if first_line(p)]


def find(name: str) -> str:
    """The file of a configuration, given its path or the name of one of the package's own.

    Args:
      name: perhaps with ``:argument`` behind it, which stays.
    """
    file, colon, argument = name.partition(':')
    ours = folder() / f'{file}.py'
    return f'{ours if ours.is_file() and not Path(file).is_file() else file}{colon}{argument}'


def load(name: str) -> Any:
    """The configuration of a file; a file of one's own starts from one of the package's with this.

    Args:
      name: as for `find`.

    Raises:
      ValueError: if there is no such file.
      TypeError: if its ``get_config`` returns something else.

    >>> load('digits_resnet').fwd
    'top_k(0.1)'
    """
    file, _, argument = find(name).partition(':')
    config = module(file).get_config(*[argument] if argument else [])
    if not isinstance(config, ml_collections.ConfigDict):
        raise TypeError(f'get_config() gives a {type(config).__name__}, not a ConfigDict')
    return config


def base_of(flags: Sequence[str]) -> str:
    """The configuration that a command line changes if it names none.

    >>> base_of(['--config.epochs=2']), base_of(['--config.model.name=own.py:network'])
    ('digits_resnet', 'common')
    """
    names_a_path = any(re.match(r'--?config\.(model|data)\.name=.*:', flag) for flag in flags)
    return PLAIN if names_a_path else DEFAULT


def first_line(path: Path) -> str:
    """What a configuration's file says first; empty of a file that is none."""
    tree = ast.parse(path.read_text())
    is_config = any(isinstance(n, ast.FunctionDef) and n.name == 'get_config' for n in tree.body)
    return (ast.get_docstring(tree) or '').partition('\n')[0] if is_config else ''
