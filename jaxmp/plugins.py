"""What an import path names: `imported`, an object; `module`, a Python file, executed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


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
