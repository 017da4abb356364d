"""Parser of exchange texts: the words that are allowed, and the exchange that a text builds."""

from __future__ import annotations

from jaxmp import spec
from jaxmp.exchange.averages import all_gather, all_reduce, double_squeeze, mean, scatter_gather
from jaxmp.exchange.layout import Exchange, Rule, bucketed, per_layer
from jaxmp.exchange.lowrank import power_sgd
from jaxmp.exchange.momentum import momentum
from jaxmp.exchange.outer import nesterov, sgd
from jaxmp.exchange.rounds import diloco, local_sgd
from jaxmp.wire.words import named

RULES: spec.Names = {
    f.__name__: f
    for f in (
        *(all_gather, all_reduce, bucketed, diloco, double_squeeze, local_sgd),
        *(momentum, nesterov, per_layer, power_sgd, scatter_gather, sgd),
    )
} | {'mean': mean, **spec.later('demo', 'dgc', 'frozen_adam')}


def parse(text: str, names: spec.Names | None = None) -> Exchange:
    """The exchange that ``text`` names; a bare rule means ``per_layer``.

    Args:
      text: for example ``'all_gather(ef(top_k(0.01)))'``, ``'power_sgd(2)'``, ``'mean'``.
      names: additional names, for your own codecs and rules.

    Raises:
      SpecError: if the text is not such an expression, or an argument in it is invalid.

    >>> parse('all_reduce(one_bit)')
    Traceback (most recent call last):
    ...
    jaxmp.spec.SpecError: in 'all_reduce(one_bit)': all_reduce adds messages, and these cannot \
be added; those of raw, fp16, bf16 and random_k can; use all_gather(...) or scatter_gather(...)
    """
    return spec.read(text, {**spec.NAMES, **RULES, **(names or {})}, _exchange)


def _exchange(thing: object, text: str) -> Exchange:
    if isinstance(thing, Exchange):
        return thing
    rule = spec.complete(thing, text)
    if isinstance(rule, Rule):
        return named(repr(rule), per_layer(rule))
    raise TypeError(
        f'{text} is not an exchange between replicas; write mean, all_gather({text}), '
        f'all_reduce({text}) or double_squeeze({text})'
    )
