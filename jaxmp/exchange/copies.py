"""`Copies`: two copies of one parameter, each with a part of its gradient, which get the sum.

An example is the token table of a GPT-2, of which the first and the last stage have a copy. The
copies share gradients as two replicas do, so every `Exchange` that returns the same gradient to all
replicas can be used, including its compression and its feedback states. Each copy passes twice its
part to the exchange; the mean of both is the sum. Doubling is exact, so that with ``mean`` the sum
is exact to the bit.

If the copies are on two devices of a process, one program runs on a mesh of both. In two processes
each runs the program in pieces, between which they swap messages. Both copies get the same bits. On
a single device one program computes both sums without communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmp.exchange.collectives import Collectives, Device, KeyWords, over, part, sent, whole
from jaxmp.exchange.hlo import operands
from jaxmp.exchange.layout import Exchange, State
from jaxmp.exchange.pieces import Buffer, in_pieces
from jaxmp.exchange.settled import reduced
from jaxmp.exchange.traffic import bytes_of
from jaxmp.wire import Like

Copy = tuple[Array, State]  # the gradient at a copy, or the sum of both; and its state
Share = Callable[[dict[str, Copy], KeyWords], dict[str, Copy]]  # by the name of the end

ENDS = 'first', 'last'
AXIS = 'end'


@dataclass(frozen=True)
class Copies:
    """Two copies of a parameter, seen from a process that has one of them or both.

    Attributes:
      exchange: the rule by which gradients are shared; exchanges of parameters (local SGD) are not
        allowed.
      like: shape and dtype of the parameter.
      here: the copies in this process, with their devices.
      swap: takes the bytes of the copy here and returns those of both, the first copy's first;
        where the other copy is in another process.
    """

    exchange: Exchange
    like: Like
    here: Mapping[str, Device]
    swap: Callable[[bytes], Sequence[Buffer]] | None = None

    def init(self) -> State:
        """States of the copies in this process, or ``()`` if the exchange has no state."""
        states = {end: jax.device_put(self._fresh(), d) for end, d in self.here.items()}
        return states if jax.tree.leaves(states) else ()

    def add(
        self, grads: Mapping[str, Array], states: State, key: Array
    ) -> tuple[dict[str, Array], State]:
        """The sum of both gradients for each copy in this process, and the next states.

        Args:
          grads: gradients of the copies in this process; donated, as the states are.
          states: states from `init` or from the last call.
          key: random key of this step, the same in both processes.
        """
        current = states or {end: self._fresh() for end in self.here}
        words = np.asarray(jax.random.key_data(key))
        out = self._run({end: (grads[end], current[end]) for end in self.here}, words)
        totals = {end: total for end, (total, _) in out.items()}
        return totals, {end: state for end, (_, state) in out.items()} if states else ()

    def traffic(self) -> dict[str, int]:
        """Bytes per step that each copy sends: ``handed`` by the exchange, ``compiled`` by XLA."""
        handed = bytes_of(self.exchange, [self.like], 2)['sent']
        if self.swap:
            return {'handed': handed, 'compiled': handed}
        compiled = {} if self._alone else operands(self._lower().compile().as_text())
        return {'handed': handed, 'compiled': sent(compiled, 2)}

    @property
    def _alone(self) -> bool:
        return len({*self.here.values()}) == 1

    def _fresh(self) -> State:
        return self.exchange.init([self.like], 2)

    def _share(self, copy: Copy, words: KeyWords, via: Collectives) -> Copy:
        grad, state = copy
        key = jax.random.wrap_key_data(words)
        [total], state = reduced(self.exchange, [2 * grad], state, key, via)
        return total, state

    @functools.cached_property
    def _run(self) -> Share:
        if self.swap:
            return self._in_two_processes(self.swap)
        return self._on_one_device() if self._alone else self._on_two_devices()

    def _in_two_processes(self, swap: Callable[[bytes], Sequence[Buffer]]) -> Share:
        share = lambda via, words, grad, state: self._share((grad, state), words, via)
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        pieces, [(end, device)] = in_pieces(share, 2, words, *self._shapes), self.here.items()

        def run(copies: dict[str, Copy], words: KeyWords) -> dict[str, Copy]:
            i = ENDS.index(end)
            out = pieces.run({i: (words, *copies[end])}, lambda rows: swap(rows[0]))
            return {end: jax.device_put(out[i], device)}

        return run

    def _on_one_device(self) -> Share:
        add = lambda tree: jax.tree.map(lambda a: lax.psum(a, AXIS), tree)

        @functools.partial(jax.jit, donate_argnums=0)
        def run(copies: dict[str, Copy], words: KeyWords) -> dict[str, Copy]:
            rows = jax.tree.map(lambda *a: jnp.stack(a), *(copies[end] for end in ENDS))
            share = lambda copy: self._share(copy, words, over(AXIS)._replace(all_reduce=add))
            out = jax.vmap(share, axis_name=AXIS)(rows)
            return {end: jax.tree.map(itemgetter(i), out) for i, end in enumerate(ENDS)}

        return run

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh of both devices."""
        return Mesh(np.array([*self.here.values()]), (AXIS,), axis_types=(AxisType.Auto,))

    @functools.cached_property
    def _program(self) -> jax.stages.Wrapped:
        run = jax.shard_map(
            lambda copy, words: _framed(self._share(self._bare(copy), words, over(AXIS))),
            mesh=self.mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS),
        )  # fmt: skip
        return jax.jit(run, donate_argnums=0)

    def _on_two_devices(self) -> Share:
        place = NamedSharding(self.mesh, P(AXIS))

        def run(copies: dict[str, Copy], words: KeyWords) -> dict[str, Copy]:
            out = self._program(whole(place, [_framed(t) for t in copies.values()]), words)
            return {end: self._bare(part(out, device)) for end, device in self.here.items()}

        return run

    @functools.cached_property
    def _shapes(self) -> tuple[Like, State]:
        """Shapes of a gradient and of a state."""
        return jax.eval_shape(lambda: (jnp.zeros(self.like.shape, self.like.dtype), self._fresh()))

    def _bare(self, copy: Copy) -> Copy:
        """Inverse of `_framed`."""
        return jax.tree.map(lambda a, s: a if s.shape else a[0], copy, self._shapes)

    def _lower(self) -> Any:
        framed = jax.eval_shape(_framed, self._shapes)
        twice = lambda a: jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype)
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        return self._program.lower(jax.tree.map(twice, framed), words)


def _framed(copy: Copy) -> Copy:
    """Scalars as arrays of one element, which a mesh of two devices can have one of each."""
    return jax.tree.map(lambda a: a if a.shape else a[None], copy)
