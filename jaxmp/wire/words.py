"""`word`: a decorator by which a codec or channel is printed, compared and hashed by its call.

A codec or a channel is a tuple of functions, which are new objects at every call. Its `Origin`
records the call: ``repr`` returns the text that `jaxmp.parse` reads, and the results of equal calls
are equal and have the same hash, so that a program compiled for one is reused for the other.
Objects built in another way (a codec of your own, or by ``_replace``) are equal if their functions
are the same objects.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec('P')
T = TypeVar('T')


class Origin(NamedTuple):
    """The call that built an object, or the name of a constant.

    Attributes:
      text: text that `jaxmp.parse` reads.
      call: the function, the names of its arguments and the arguments; for a constant, its fields.
      fields: fields of the object. An object with other fields (from ``_replace``) does not have
        this origin.
    """

    text: str
    call: tuple
    fields: tuple


def known(of: type[T]) -> type[T]:
    """Makes a named tuple with a last field ``origin`` print, compare and hash by that field."""
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
    """Makes a function of the algebra record the call in the object that it returns.

    >>> import jaxmp
    >>> c = jaxmp.ef(jaxmp.top_k(0.1, jaxmp.fp16))
    >>> c, c == jaxmp.parse(str(c)), c == jaxmp.parse('ef(top_k(0.1))')
    (ef(top_k(0.1, values=fp16)), True, False)
    """

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        result = function(*args, **kwargs)
        bound = inspect.signature(make).bind(*args, **kwargs)
        return called(make.__name__, make, bound, result)

    return make


def called(name: str, function: Callable, bound: inspect.BoundArguments, result: T) -> T:
    """``result`` with its origin: the call of ``function``, ``name`` in texts, with ``bound``."""
    forms = bound.signature.parameters
    written = {k: v for k, v in bound.arguments.items() if not _same(v, forms[k].default)}
    parts = (
        spell(v) if forms[k].default is inspect.Parameter.empty else f'{k}={spell(v)}'
        for k, v in written.items()
    )
    call = function, tuple(written), *written.values()
    return named(f'{name}({", ".join(parts)})', result, call)


def named(text: str, thing: T, call: tuple | None = None) -> T:
    """``thing`` with a text as its origin, if it has such a field; equality does not change."""
    if 'origin' not in getattr(thing, '_fields', ()):
        return thing
    any_: Any = thing
    old, fields = _origin(thing), tuple(any_)[:-1]
    return any_._replace(origin=Origin(text, old.call if old else call or fields, fields))


def text(thing: Any) -> str:
    """The text of ``thing``, or a description of it if no word names it."""
    origin = _origin(thing)
    return origin.text if origin else f'{type(thing).__name__}({spell(thing[0])}, ...)'


def _origin(thing: Any) -> Origin | None:
    origin = thing.origin
    return origin if origin is not None and origin.fields == tuple(thing)[:-1] else None


def _identity(thing: Any) -> tuple:
    origin = _origin(thing)
    return origin.call if origin else tuple(thing)[:-1]


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and bool(value == default)


def spell(value: object) -> str:
    """An argument as written in a text."""
    return value.__name__ if inspect.isfunction(value) else repr(value)


def form(function: Callable) -> str:
    """The parameters of a function with their defaults, as written in a text.

    >>> form(lambda bits, size=64: ...)
    '(bits, size=64)'
    """
    parameters = inspect.signature(function).parameters.values()
    words = (p.name if p.default is p.empty else f'{p.name}={spell(p.default)}' for p in parameters)
    return f'({", ".join(words)})'


def check_whole(name: str, value: object, kind: str, least: int = 1, most: float = inf) -> None:
    """Raises ValueError unless ``value`` is an integer from ``least`` to ``most``, a ``kind``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f'{name} {value!r} is not {kind}')


def check_bools(word: str, **values: object) -> None:
    """Raises TypeError unless all arguments of ``word`` are truth values."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f'{word} {name} must be True or False, got {value!r}')
