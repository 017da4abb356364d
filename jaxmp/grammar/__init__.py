"""The words of the algebra, read from the code: their kinds, forms, costs and sources.

`jaxmp codecs` prints them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Iterable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmp import codecs, exchange, spec
from jaxmp.feedback.channel import Channel
from jaxmp.grammar.sinks import errors
from jaxmp.plugins import module_of
from jaxmp.spec import Names
from jaxmp.wire import Ctx, bits, like
from jaxmp.wire.words import form

TENSOR = jax.ShapeDtypeStruct((32, 16, 16, 64), 'float32')
REPLICAS = 2


class Kind(NamedTuple):
    """A nonterminal of the grammar.

    Attributes:
      title: of its words.
      types: names of the types that its words have or return.
      frame: the text in which a word of the kind is measured.
    """

    title: str
    types: tuple[str, ...] = ()
    frame: str = '{}'


KINDS = {
    'channel': Kind('Feedback rules', ('Channel',)),
    'codec': Kind('Codecs', ('Codec',)),
    'index': Kind('Index codings', ('IndexCoding',), 'top_k(0.1, indices={})'),
    'rounding': Kind('Roundings', frame='uniform(4, rounding={})'),
    'search': Kind('Searches of a polar codeword', ('Search',), 'polar(0.5, search={})'),
    'exchange': Kind('Exchanges of a whole gradient', ('Exchange',)),
    'rule': Kind('Rules between replicas, for each large array', ('Rule',)),
    'outer': Kind('Outer optimizers of a round', ('Outer',), 'diloco(30, mean, outer={})'),
}
BETWEEN = 'exchange', 'rule', 'outer'
KNOWN = {**spec.NAMES, **exchange.RULES}
ARGUMENTS = {  # what stands for a parameter in an example
    'bits': '4',
    'channel': 'ef(one_bit)',
    'all_reduce.channel': 'ef(random_k(0.1))',
    'codec': 'top_k(0.1)',
    'count': '8',
    'double_squeeze.codec': 'one_bit',
    'per_sample.codec': 'uniform(8)',
    'per_token.codec': 'uniform(8)',
    'rotate.codec': 'polar(0.5)',
    'k_means.bits': '2',
    'size': '4096',
    'spikes.codec': 'block(4)',
    'trellis.bits': '2',
    'down': 'ef(one_bit)',
    'up': 'ef(one_bit)',
    'examples': '1000',
    'fraction': '0.1',
    'high': 'lloyd(4)',
    'levels': '4',
    'outliers.codec': 'lloyd(4)',
    'low': 'lloyd(3)',
    'lr': '0.7',
    'momentum': '0.9',
    'paths': '8',
    'rank': '2',
    'rate': '0.5',
    'rule': 'all_gather(ef21(top_k(0.1)))',
    'steps': '8',
    'vocabulary': '256',
}


class Word(NamedTuple):
    """A word of the algebra.

    Attributes:
      kind: a key of `KINDS`.
      form: the word with its parameters and their defaults.
      example: the text that was measured.
      bits: per element of `TENSOR`: of its message; between replicas, what one of `REPLICAS` sends
        on a ring. None where the example cannot be measured.
      note: the collectives of an exchange; where ``bits`` is None, the reason.
      line: the first sentence of its docstring.
      sources: the references of its docstring.
    """

    kind: str
    form: str
    example: str
    bits: float | None
    note: str
    line: str
    sources: tuple[str, ...]


def kind_of(thing: object) -> str | None:
    """The kind of a word, or None if ``thing`` is none; of a function, what it says to return."""
    if inspect.isfunction(thing) and thing in spec.ROUNDINGS:
        return 'rounding'
    type_ = inspect.signature(thing).return_annotation if inspect.isfunction(thing) else type(thing)
    first = getattr(type_, '__name__', str(type_)).partition(' | ')[
        0
    ]  # a codec over a codec, first
    name = first.rpartition('.')[2]
    return next((k for k, kind in KINDS.items() if name in kind.types), None)


def ours() -> list[Word]:
    """The words of this package, without those of `jaxmp.contrib`."""
    return words_of(KNOWN, (codecs, exchange))


def young() -> list[Word]:
    """The words of `jaxmp.contrib`."""
    later = (thing for thing in KNOWN.values() if isinstance(thing, spec.Later))
    return words_of({thing.name: thing.word() for thing in later}, ())


def words_of(names: Names, modules: Iterable[ModuleType]) -> list[Word]:
    """The words among ``names``, by kind and name.

    Args:
      names: what texts may name, besides the words of this package.
      modules: where docstrings of constants stand.
    """
    docs = {name: text for m in modules for name, text in _constants(m).items()}
    words = []
    for name, thing in sorted(names.items()):
        if kind := kind_of(thing):
            text = inspect.getdoc(thing) if inspect.isfunction(thing) else docs.get(name)
            measured = _measured(kind, name, thing, {**KNOWN, **names})
            arguments = form(thing) if inspect.isfunction(thing) and kind != 'rounding' else ''
            words.append(Word(kind, name + arguments, *measured, _line(text), _sources(text)))
    return sorted(words, key=lambda w: list(KINDS).index(w.kind))


def own(module: ModuleType) -> dict[str, object]:
    """The words that a module lists in ``__all__`` or, without one, defines."""
    return {name: thing for name, thing in _public(module).items() if kind_of(thing)}


def _unsaid(module: ModuleType) -> dict[str, object]:
    """A module's functions that do not say what they return, which may have been meant as words."""
    return {
        name: spec.NoWord(
            f'{module.__file__} does not say what it returns; write '
            f'def {name}{inspect.signature(thing)} -> jaxmp.Codec'
        )
        for name, thing in _public(module).items()
        if inspect.isfunction(thing) and 'return' not in thing.__annotations__
    }


def _public(module: ModuleType) -> dict[str, object]:
    """What a module lists in ``__all__`` or, without one, defines."""
    assigned = _assigned(module)
    home = lambda thing: inspect.isfunction(thing) and thing.__module__
    here = lambda name, thing: name in assigned or home(thing) == module.__name__
    listed = getattr(module, '__all__', None) or [k for k, v in vars(module).items() if here(k, v)]
    return {name: vars(module)[name] for name in listed if not name.startswith('_')}


def own_words(text: str) -> dict[str, object]:
    """The words of ``config.codecs``: modules or files, with commas between them.

    What they have besides is `jaxmp.spec.NoWord` where it may have been meant as a word.

    Raises:
      ValueError: as `imported`.
    """
    places = [where.strip() for where in text.split(',') if where.strip()]
    modules = imported(places, f'config.codecs={text!r}: ')
    unsaid = {k: v for m in modules for k, v in _unsaid(m).items() if k not in KNOWN}
    return unsaid | {k: v for m in modules for k, v in own(m).items()}


def parted(text: str) -> tuple[str, str]:
    """A text and the Python file before it, or an empty one.

    >>> parted('mine.py:ef(mine(2))'), parted('mx(4)')
    (('ef(mine(2))', 'mine.py'), ('mx(4)', ''))
    """
    file, colon, rest = text.partition('.py:')
    return (rest.strip(), f'{file.strip()}.py') if colon else (text.strip(), '')


def channel_of(text: str, names: Names) -> Channel:
    """The channel of a text, perhaps with the file of its words before it: ``mine.py:mine(2)``.

    Raises:
      ValueError: as `imported` and `jaxmp.spec.parse`.
    """
    rest, file = parted(text)
    return spec.parse(rest, {**names, **own_words(file)})


def check_channels(texts: Iterable[str], names: Names | None = None) -> None:
    """Raises ValueError if a text is no channel, where the numbers of a run are not known yet."""
    for text in texts:
        channel_of(text, {'examples': 1024, 'vocabulary': 1024, **(names or {})})


def imported(places: Iterable[str], says: str = '') -> list[ModuleType]:
    """Modules with words of their own, by their names or files.

    Raises:
      ValueError: if one cannot be imported, or has no word; the message begins with ``says``.
    """
    modules = []
    for where in places:
        modules.append(
            module_of(where, says, 'give modules or files with codecs, rules, exchanges')
        )
        if not own(modules[-1]):
            raise ValueError(
                f'{says}{where} has no words; a word is a jaxmp.Codec, or a public function that '
                'says to return one: def mine(bits: int) -> jaxmp.Codec'
            )
    return modules


def _measured(kind: str, name: str, thing: object, names: Names) -> tuple[str, float | None, str]:
    """An example of a word, its bits per element, and the collectives or what is missing."""
    call = name
    if inspect.isfunction(thing) and kind != 'rounding':
        parameters = inspect.signature(thing).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty]
        arguments = [ARGUMENTS.get(f'{name}.{p}', ARGUMENTS.get(p, '')) for p in needed]
        if '' in arguments:
            return '', None, f'no example of {needed[arguments.index("")]}'
        call = f'{name}({", ".join(arguments)})'
    example = KINDS[kind].frame.format(call)
    try:
        return example, *_cost(kind, example, names)
    except Exception as error:  # of a codec that is not ours
        return example, None, f'{type(error).__name__}: {error}'


def _cost(kind: str, example: str, names: Names) -> tuple[float, str]:
    if kind in BETWEEN:
        sent = exchange.bytes_of(exchange.parse(example, names), TENSOR, REPLICAS)
        return 8 * sent['sent'] / TENSOR.size, ', '.join(sent['handed'])
    channel = spec.parse(example, names)
    return bits(channel, TENSOR, jax.eval_shape(_context, TENSOR)) / TENSOR.size, ''


def above_shannon(example: str, names: Names = KNOWN) -> float | None:
    """Bits per element that a codec spends above Shannon's bound on normal data; None for no error.

    A code of error D, as a part of the energy, needs ``log2(1 / D) / 2`` bits.
    """
    channel, x = spec.parse(example, names), jax.random.normal(jax.random.key(0), (64, 1024))

    @jax.jit
    def error(x: jax.Array) -> jax.Array:
        ctx, codec = _context(x)._replace(key=jax.random.key(1)), channel.codec  # not that of x
        y = codec.decode(codec.encode(x, ctx), like(x), ctx)
        return jnp.sum((x - y) ** 2) / jnp.sum(x**2)

    lost = float(error(x))
    spent = bits(channel, x, jax.eval_shape(_context, x)) / x.size
    return spent - math.log2(1 / lost) / 2 if lost else None


def on_text(example: str, names: Names = KNOWN) -> str:
    """The errors of a codec on a language model's activations; see `jaxmp.grammar.sinks`."""
    try:
        return str(errors(spec.parse(example, names).codec))
    except Exception as error:  # of a codec that is not ours
        return type(error).__name__


def _context(x: jax.Array) -> Ctx:
    """What a crossing of ``x`` knows behind a forward message of ``top_k(0.1)``."""
    codec = spec.parse('top_k(0.1)').codec
    ctx = Ctx.example(x)
    return ctx._replace(indices=codec.indices(codec.encode(x, ctx), like(x), ctx))


# Docstrings.


def _modules(package: ModuleType) -> list[ModuleType]:
    """A module, or the modules of a package."""
    inner = [m.name for m in pkgutil.iter_modules(getattr(package, '__path__', ()))]
    names = [f'{package.__name__}.{name}' for name in inner if name != '__main__']
    return [package, *map(importlib.import_module, names)]


def _assigned(module: ModuleType) -> dict[str, str]:
    """Names that a module assigns, and the docstrings below them."""
    body, docstrings = ast.parse(inspect.getsource(module)).body, {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        below = after.value if isinstance(after, ast.Expr) else None
        text = below.value if isinstance(below, ast.Constant) else ''
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', None)]
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        docstrings |= dict.fromkeys(names, inspect.cleandoc(str(text)))
    return docstrings


def _constants(package: ModuleType) -> dict[str, str]:
    return {name: text for m in _modules(package) for name, text in _assigned(m).items() if text}


def _line(text: str | None) -> str:
    """The first sentence."""
    sentence = re.match(r'.*?\.(?=\s|$)', text or '', re.DOTALL)
    return re.sub(r'\s+', ' ', sentence[0]) if sentence else ''


def _sources(text: str | None) -> tuple[str, ...]:
    part = (text or '').partition('References:\n')[2]
    references = re.sub(r'\s+', ' ', part.partition('\n\n')[0]).strip().rstrip('.')
    return tuple(s.strip() for s in references.split(';') if s)
