"""Parser of channel texts, which configs, the command line, logs and tables use.

A text is a Python expression of names, numbers and calls only. It is parsed, never evaluated: names
are looked up among the package's public codecs, index codings, roundings and feedback rules, so the
namespace is the registry.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from jaxmp import codecs, feedback
from jaxmp.feedback import Channel, direct
from jaxmp.terminal import hint
from jaxmp.wire import Codec
from jaxmp.wire.words import called, form, named

LONGEST = 1000
ROUNDINGS = (codecs.nearest, codecs.stochastic)
Names = Mapping[str, object]  # what texts may name: functions, codecs, rules, numbers
T = TypeVar('T')


class NoWord(NamedTuple):
    """Among names, what no text may name, and why."""

    reason: str


class Later(NamedTuple):
    """Among names, a word of `jaxmp.contrib`, whose file is imported when a text first names it."""

    name: str

    def word(self) -> object:
        """The word itself."""
        return getattr(importlib.import_module(f'jaxmp.contrib.{self.name}'), self.name)


def later(*names: str) -> dict[str, Later]:
    """Words of `jaxmp.contrib` by their names."""
    return {name: Later(name) for name in names}


RULES = ('direct', 'ef', 'ef21', 'ef_mixed', 'aqsgd', 'anchored', 'klt')
NAMES: Names = {
    **{name: getattr(codecs, name) for name in codecs.__all__ if name != 'IndexCoding'},
    **{name: getattr(feedback, name) for name in RULES},
    'outliers': feedback.outliers,  # a codec over a codec, a rule over a rule
    **later('adaptive', 'dct', 'k_means'),
}
LEFT: Names = {  # words that left, and what to write instead
    'by_name': NoWord(
        'no run used it, and it left; docs/own_exchange.md says how to write your own'
    ),
    'by_size': NoWord(
        'per_layer does it; write per_layer(all_gather(ef(one_bit)), smallest=10000)'
    ),
}


class SpecError(ValueError):
    """An invalid channel text; the message quotes the text and gives the reason."""


def parse(text: str, names: Names | None = None) -> Channel:
    """The channel that ``text`` names; a bare codec means ``direct``.

    Texts with the same calls give equal channels, and ``parse(str(c), names) == c``.

    Args:
      text: for example ``'ef21(top_k(0.1, values=fp16, indices=bitmap))'``.
      names: additional names, for your own codecs (functions or codecs) or numbers.

    Raises:
      SpecError: if the text is not such an expression, or an argument in it is invalid.

    >>> parse('top_k(10)')
    Traceback (most recent call last):
    ...
    jaxmp.spec.SpecError: in 'top_k(10)': top_k fraction 10 is not in (0, 1]; for 10 % write \
top_k(0.1)
    """
    return read(text, {**NAMES, **(names or {})}, _channel)


def read(text: str, names: Names, finish: Callable[[Any, str], T]) -> T:
    """The object that ``text`` builds from ``names``.

    Args:
      text: an expression of names, numbers and calls.
      names: all allowed names.
      finish: ``(object, text) -> result``, which raises TypeError if the object has a wrong type.

    Raises:
      SpecError: if the text is not such an expression, or an argument in it is invalid.
    """
    if not isinstance(text, str):
        raise SpecError(f'a channel is named by a text such as "top_k(0.1)", got {text!r}')
    if len(text) > LONGEST:
        raise SpecError(f'a channel text has at most {LONGEST} characters, got {len(text)}')
    try:
        return finish(_build(_tree(text), names), text.strip())
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise SpecError(
            f'in {text!r}: not an expression of names, numbers and calls such as '
            f'ef21(top_k(0.1, values=fp16)) ({error})'
        ) from None
    except (TypeError, ValueError) as error:
        raise SpecError(f'in {text!r}: {error}') from None


def _tree(text: str) -> ast.expr:
    """The expression of a text."""
    try:
        return ast.parse(text.strip(), mode='eval').body
    except ValueError as error:  # of null bytes, before Python 3.11.4
        raise SyntaxError(str(error)) from None


def canonical(text: str, names: Names | None = None) -> str:
    """The text in its canonical spelling, which is that of Python's unparser; see `parse`.

    >>> canonical(' top_k( 0.10,values = fp16 ) ')
    'top_k(0.1, values=fp16)'
    """
    parse(text, names)
    return ast.unparse(ast.parse(text.strip(), mode='eval'))


def _channel(thing: object, text: str) -> Channel:
    if isinstance(thing, Channel):
        return thing
    codec = complete(thing, text)
    if not isinstance(codec, Codec):
        raise TypeError(f'{text} is not a codec or feedback rule by itself')
    return named(repr(codec), direct(codec))


def complete(thing: T, text: str) -> T:
    """``thing``; raises SpecError if it is a function whose arguments are missing."""
    if inspect.isfunction(thing):
        raise SpecError(_incomplete(text, thing))
    return thing


def _build(node: ast.expr, names: Names) -> object:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name):
            return named(name, _look_up(name, names))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _call(name, args, keywords, names)
    raise SpecError(
        f'{ast.unparse(node)!r} is not allowed; write names, numbers and calls such as '
        'ef21(top_k(0.1, values=fp16))'
    )


def _look_up(name: str, names: Names) -> object:
    found = names.get(name, LEFT.get(name))
    if isinstance(found, NoWord):
        raise SpecError(f'{name!r} is no word: {found.reason}')
    if isinstance(found, Later):
        return found.word()
    if name in names:
        return found
    allowed = sorted(k for k, thing in names.items() if not isinstance(thing, NoWord))
    raise SpecError(f'unknown word {name!r}{hint(name, allowed)}; allowed are {", ".join(allowed)}')


def _call(name: str, args: list[ast.expr], keywords: list[ast.keyword], names: Names) -> object:
    function = _look_up(name, names)
    if not callable(function) or isinstance(function, tuple) or function in ROUNDINGS:
        such = f', as in uniform(4, rounding={name})' if function in ROUNDINGS else ''
        raise SpecError(f'{name} takes no arguments; write {name}{such}')
    built = [_argument(a, names) for a in args]
    named = {k.arg or '**': _argument(k.value, names) for k in keywords}
    if len(named) < len(keywords):
        raise SpecError(f'{name}: an argument is given twice; its form is {name}{form(function)}')
    try:
        bound = inspect.signature(function).bind(*built, **named)
    except TypeError as error:
        raise SpecError(f'{name}: {error}; its form is {name}{form(function)}') from None
    return called(name, function, bound, function(*bound.args, **bound.kwargs))


def _argument(node: ast.expr, names: Names) -> object:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    value = _build(node, names)
    if inspect.isfunction(value) and value not in ROUNDINGS:
        raise SpecError(_incomplete(ast.unparse(node), value))
    return value


def _incomplete(text: str, function: Callable) -> str:
    return f'{text} needs its arguments: {text}{form(function)}'
