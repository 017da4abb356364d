"""`word`: what a call of the algebra makes is known by that call, its text and its identity.

A codec or a channel is a tuple of functions, new ones at every call. Its `Origin` remembers the
call: ``repr`` gives the text that `jaxmp.parse` reads, and what equal calls made is equal and has
one hash, so that a program compiled for one serves the other. What was made in another way (an own
codec, ``_replace``) is equal where its functions are the same objects.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec('P')
T = TypeVar('T')


class Origin(NamedTuple):
    """The call that made a thing, or the name of a constant.

    Attributes:
      text: as `jaxmp.parse` reads it.
      call: the function, the names of its arguments and these; of a constant, the fields.
      fields: those of the thing that was made. Another thing (``_replace``) has another origin.
    """

    text: str
    call: tuple
    fields: tuple


def known(of: type[T]) -> type[T]:
    """A class of named tuples, the last field ``origin``: printed, compared and hashed by it."""
    same = lambda a, b: type(a) is type(b) and _identity(a) == _identity(b)
    methods = {
        '__repr__': text,
        '__eq__': same,
        '__ne__': lambda a, b: not same(a, b),
        '__hash__': lambda a: hash(_identity(a)),
    }
    for name, method in methods.items():
        setattr(of, name, method)
    return of


def word(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the algebra: what it returns is known by the call.

    >>> import jaxmp
    >>> c = jaxmp.ef(jaxmp.top_k(0.1, jaxmp.fp16))
    >>> c, c == jaxmp.parse(str(c)), c == jaxmp.parse('ef(top_k(0.1))')
    (ef(top_k(0.1, values=fp16)), True, False)
    """

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        made = function(*args, **kwargs)
        return called(make.__name__, make, inspect.signature(make).bind(*args, **kwargs), made)

    return make


def called(name: str, function: Callable, bound: inspect.BoundArguments, made: T) -> T:
    """``made`` as what ``function``, called ``name`` in texts, returned for ``bound``."""
    forms = bound.signature.parameters
    given = {k: v for k, v in bound.arguments.items() if not _same(v, forms[k].default)}
    said = (
        _spell(v) if forms[k].default is inspect.Parameter.empty else f'{k}={_spell(v)}'
        for k, v in given.items()
    )
    return named(f'{name}({", ".join(said)})', made, (function, tuple(given), *given.values()))


def named(text: str, thing: T, call: tuple | None = None) -> T:
    """``thing``, if it has a place for its origin, under a text; it stays equal to what it was."""
    if 'origin' not in getattr(thing, '_fields', ()):
        return thing
    any_: Any = thing
    old, fields = _origin(thing), tuple(any_)[:-1]
    return any_._replace(origin=Origin(text, old.call if old else call or fields, fields))


def functions(thing: Any) -> Iterator[Callable]:
    """The functions that made ``thing`` and its parts."""
    for part in _identity(thing):
        if inspect.isfunction(part):
            yield part
        elif 'origin' in getattr(part, '_fields', ()):
            yield from functions(part)


def text(thing: Any) -> str:
    """The text of ``thing``, or what it is if no word names it."""
    origin = _origin(thing)
    return origin.text if origin else f'{type(thing).__name__}({_spell(thing[0])}, ...)'


def _origin(thing: Any) -> Origin | None:
    origin = thing.origin
    return origin if origin is not None and origin.fields == tuple(thing)[:-1] else None


def _identity(thing: Any) -> tuple:
    origin = _origin(thing)
    return origin.call if origin else tuple(thing)[:-1]


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _spell(value: Any) -> str:
    return value.__name__ if inspect.isfunction(value) else repr(value)
