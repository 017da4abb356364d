"""`by_size` and `by_name`: which exchange for which parameters."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jaxtyping import Array

from jaxmp.exchange.collectives import Collectives, Grads, Tree
from jaxmp.exchange.layout import Exchange, Rule, State, exchange_of, joined, split
from jaxmp.wire.words import check_whole, word


def _either(
    name: str, pair: tuple[Rule | Exchange, Rule | Exchange], second: Callable[[str, Array], bool]
) -> Exchange:
    """The second of two exchanges for the arrays that ``second(name, array)`` chooses."""
    rules = [exchange_of(name, rule) for rule in pair]
    if rules[0].momentum != rules[1].momentum:
        raise ValueError(
            f'{name}: the momentum of {rules[0]} is {rules[0].momentum} and that of {rules[1]} '
            f'{rules[1].momentum}, and the optimizer has one for all parameters; take equal ones'
        )

    def owners(tree: Tree) -> list[int]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        path = lambda p: jax.tree_util.keystr(p, simple=True, separator='/')
        return [int(second(path(p), a)) for p, a in leaves]

    def init(grads: Grads, n: int) -> State:
        parts = split(grads, owners(grads), 2)
        return [r.init(p, n) if jax.tree.leaves(p) else () for r, p in zip(rules, parts)]  # noqa: B905

    def reduce(grads: Grads, state: State, key: Array, via: Collectives) -> tuple[Grads, State]:
        via.own(grads)
        numbers, out, after = owners(grads), [], []
        for i, part in enumerate(split(grads, numbers, 2)):
            done = part, ()
            if jax.tree.leaves(part):
                done = rules[i].reduce(part, state[i], jax.random.fold_in(key, i), via)
            out.append(done[0])
            after.append(done[1])
        return joined(out, numbers, grads), after

    spans = range(max(len(r.by_epoch) for r in rules))
    phases = (_either(name, (rules[0].phase(t), rules[1].phase(t)), second) for t in spans)
    return Exchange(init, reduce, by_epoch=tuple(phases), momentum=rules[0].momentum)


@word
def by_size(small: Rule | Exchange, large: Rule | Exchange, elements: int) -> Exchange:
    """One exchange for arrays with fewer than some number of elements, another for the others.

    A bare rule is ``per_layer`` of it, which averages vectors uncompressed. In rounds it stands
    inside: ``diloco(30, by_size(mean, all_gather(ef(one_bit)), 10000))``.

    Args:
      small: exchange of gradients, or rule, of the small arrays.
      large: that of the other arrays.
      elements: the number of elements from which an array is large, 1 or more.

    Raises:
      TypeError: if one is neither a rule nor an exchange.
      ValueError: if ``elements`` is not a positive integer, an exchange shares parameters, or the
        two have different momentum.
    """
    check_whole('by_size elements', elements, 'a positive integer')
    return _either('by_size', (small, large), lambda name, a: a.size >= elements)


@word
def by_name(part: str, rule: Rule | Exchange, rest: Rule | Exchange) -> Exchange:
    """One exchange for the parameters whose names contain a text, another for the others.

    A name is the path of a parameter in its stage, such as ``h_0/attn/c_attn/kernel``.

    Args:
      part: the text, in quotes: ``by_name("wte", mean, all_gather(ef(one_bit)))``.
      rule: exchange of gradients, or rule, of the parameters with such names.
      rest: that of the other parameters.

    Raises:
      TypeError: if ``part`` is not a text, or one of the others is neither a rule nor an exchange.
      ValueError: if an exchange shares parameters, or the two have different momentum.
    """
    if not isinstance(part, str):
        raise TypeError(f'by_name part {part!r} is not a text; write by_name("wte", mean, ...)')
    return _either('by_name', (rest, rule), lambda name, a: part in name)
