"""What a text names: `imported`, the object of an import path; `load`, a configuration's file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_collections

DEFAULT = 'digits_resnet'
PLAIN = 'common'  # for an own model or data set: all defaults, nothing of the digits


def imported(key: str, path: str, wanted: str) -> Any:
    """The object that an import path names.

    Args:
      key: of the configuration, for errors.
      path: ``'package.module:name'`` or ``'folder/file.py:name'``.
      wanted: how the object is called and what it returns, such as ``load(config) -> Dataset``;
        a function must take as many arguments.

    Raises:
      ValueError: if there is no such module or object, or a function of other arguments.

    >>> imported('metric', 'math:hypot', 'metric(output, y) -> a value per example')
    <built-in function hypot>
    """
    where, _, name = path.rpartition(':')
    says = f'config.{key}={path!r}: '
    module = module_of(where, says, f'it must name {wanted}')
    if not hasattr(module, name):
        raise ValueError(f'{says}{where} has no {name!r}; it must name {wanted}')
    thing = getattr(module, name)
    if inspect.isfunction(thing):
        count = wanted.partition('(')[2].partition(')')[0].count(',') + 1
        try:
            inspect.signature(thing).bind(*[None] * count)
        except TypeError as error:
            raise ValueError(
                f'{says}{name}{inspect.signature(thing)} does not fit ({error}); it must be '
                f'{wanted}'
            ) from None
    return thing


def module_of(where: str, says: str, wanted: str) -> ModuleType:
    """The module or file ``where``, looked for in the working folder too.

    Raises:
      ValueError: if there is none, or it cannot be imported.
    """
    try:
        if where.endswith('.py'):
            return _file(Path(where))
        if '' not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        return importlib.import_module(where)
    except Exception as error:  # of the user's own file, which may raise anything
        raise ValueError(
            f'{says}cannot import {where!r} ({type(error).__name__}: {error}); {wanted}'
        ) from error


def _file(path: Path) -> ModuleType:
    """A Python file as a module, imported once."""
    name = str(path.resolve())
    return sys.modules[name] if name in sys.modules else module(name)


def called(key: str, path: str, wanted: str, *args: object) -> Any:
    """What the function that an import path names returns for ``args``; see `imported`.

    Raises:
      ValueError: as `imported`; if the function fails, with the line where it does.
    """
    function = imported(key, path, wanted)
    try:
        return function(*args)
    except Exception as error:  # of the user's own function, which may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f'config.{key}={path!r}: {type(error).__name__} in {frame.filename}, '
            f'line {frame.lineno}: {error}; it must be {wanted}'
        ) from error


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


def module(file: str) -> ModuleType:
    """A Python file, executed; it can import its neighbours, now and later.

    `pickle` and `dataclasses` find it by its path.

    Raises:
      ValueError: if there is no such file, or its name is not one of Python's.
    """
    name = str(Path(file).resolve())
    see_beside(name)
    spec = importlib.util.spec_from_file_location(name, name)
    if spec is None or spec.loader is None or not Path(name).is_file():
        raise ValueError('there is no such Python file')
    sys.modules[name] = new = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(new)
    except BaseException:
        del sys.modules[name]
        raise
    return new


def see_beside(file: str) -> None:
    """Lets all modules import the neighbours of ``file``, after whatever else has their name."""
    if (folder := str(Path(file).resolve().parent)) not in sys.path:
        sys.path.append(folder)


def first_line(path: Path) -> str:
    """What a configuration's file says first; empty of a file that is none."""
    tree = ast.parse(path.read_text())
    is_config = any(isinstance(n, ast.FunctionDef) and n.name == 'get_config' for n in tree.body)
    return (ast.get_docstring(tree) or '').partition('\n')[0] if is_config else ''
