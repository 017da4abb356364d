"""One stage as a program of its own: a compiled forward, a compiled backward, and its state.

The forward reads a message, runs the stage and writes a message; the backward reads a gradient,
recomputes the stage from its saved input, adds to the sums and writes the input's gradient. What
the messages are and what is remembered is the channels' business, when the tasks run that of
`jaxmp.schedule`, and where the messages go that of `jaxmp.transport`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.boundary import Boundary
from jaxmp.feedback import Channel
from jaxmp.wire import Ctx, Like, Payload, like

Loss = Callable[[Array, Array], tuple[Array, Any]]


class End(NamedTuple):
    """What a stage remembers at one of its links: slots of its sending and receiving channel."""

    tx: tuple[Any, ...] = ()
    rx: tuple[Any, ...] = ()


class StageState(NamedTuple):
    """What a stage keeps between steps; the first has no left end, the last no right one."""

    variables: Mapping[str, Any]
    left: End
    right: End


class Feed(NamedTuple):
    """A micro-batch as one stage needs it.

    Attributes:
      x: input, in the first stage.
      y: targets, in the last.
      ctx: the step's key, and the ids of this micro-batch.
      micro: its number.
      share: its weight in the means of loss and gradients, 1 / M.
    """

    x: Any
    y: Any
    ctx: Ctx
    micro: Any
    share: Any


class Saved(NamedTuple):
    """What the forward of a micro-batch leaves for its backward."""

    x: Array
    rest: Any
    received: Array | None
    sent: Array | None


class Total(NamedTuple):
    """Means so far: loss and what comes with it (in the last stage), and the gradients."""

    loss: Array
    aux: Any
    grads: Any


@dataclass(frozen=True)
class Stage:
    """One stage: its module, the boundaries beside it and its compiled tasks.

    Attributes:
      index: its number.
      module: Flax module.
      left: boundary to the stage before, or None.
      right: boundary to the stage after, or None.
      x: a micro-batch of its input.
      y: a micro-batch of its output.
      loss: ``(y, target) -> (scalar, aux)``, in the last stage.
      kwargs: passed to the module.
      options: compiler options of `jax.jit`.
    """

    index: int
    module: nn.Module
    left: Boundary | None
    right: Boundary | None
    x: Like
    y: Like
    loss: Loss | None
    kwargs: Mapping[str, Any]
    options: Any = None

    @functools.cached_property
    def init(self) -> Callable[[Array], StageState]:
        """``key -> state``: variables as `Pipeline.init` makes them, one slot at each end."""
        return jax.jit(self._init, compiler_options=self.options)

    @functools.cached_property
    def forward(self) -> Callable:
        """``(variables, feed, message, rx, tx) -> (saved, rest, message, rx, tx)``.

        It takes ``rx`` and ``tx`` over: their buffers become those of the new states, so that a
        step copies no table. `predict` leaves them as they are.
        """
        run = lambda *given: self._forward(*given)[1:]
        return jax.jit(run, donate_argnums=(3, 4), compiler_options=self.options)

    @functools.cached_property
    def predict(self) -> Callable:
        """``(variables, feed, message, rx, tx) -> (output, message, rx, tx)``; saves nothing."""

        def predict(*given: Any) -> tuple:
            y, _, _, message, rx, tx = self._forward(*given)
            return None if self.right else y, message, rx, tx

        return jax.jit(predict, compiler_options=self.options)

    @functools.cached_property
    def backward(self) -> Callable:
        """``(total, params, feed, saved, message, rx, tx) -> (total, message, rx, tx)``.

        It takes ``total``, ``rx`` and ``tx`` over; see `forward`.
        """
        return jax.jit(self._backward, donate_argnums=(0, 5, 6), compiler_options=self.options)

    @functools.cached_property
    def zeros(self) -> Callable[[Any, Any], Total]:
        """``(params, target) -> total``, all zero."""

        def zeros(params: Any, target: Any) -> Total:
            shapes = jax.eval_shape(self._score, jnp.zeros(self.y.shape, self.y.dtype), target)
            zero = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
            loss, aux = jax.tree.map(zero, shapes)
            return Total(loss, aux, jax.tree.map(jnp.zeros_like, params))

        return jax.jit(zeros, keep_unused=True, compiler_options=self.options)

    def _score(self, y: Array, target: Any) -> tuple[Array, Any]:
        return self.loss(y, target) if self.loss else (jnp.sum(y), None)

    def _init(self, key: Array) -> StageState:
        keys = {'params': jax.random.fold_in(key, self.index), 'dropout': key}
        made = self.module.init(keys, jnp.zeros(self.x.shape, self.x.dtype), **self.kwargs)
        left, right = End(), End()
        if self.left:
            left = End((self.left.bwd.init(self.x)[0],), (self.left.fwd.init(self.x)[1],))
        if self.right:
            right = End((self.right.fwd.init(self.y)[0],), (self.right.bwd.init(self.y)[1],))
        return StageState(dict(made), left, right)

    def _at(self, feed: Feed) -> tuple[Ctx, Ctx, Ctx]:
        """Contexts of the left boundary, of the stage and of the right one; see Pipeline.apply."""
        ctx, i = feed.ctx.fold(feed.micro), 2 * self.index
        return ctx.fold(i), ctx.fold(i + 1), ctx.fold(i + 2)

    def _run(self, variables: Any, x: Array, ctx: Ctx) -> tuple[Array, dict]:
        mutable = [name for name in variables if name != 'params']
        rngs = {} if ctx.key is None else {'dropout': ctx.key}
        y, changed = self.module.apply(variables, x, mutable=mutable, rngs=rngs, **self.kwargs)
        return y, {name: changed.get(name, variables[name]) for name in mutable}

    def _forward(self, variables: Any, feed: Feed, message: Payload, rx: Any, tx: Any) -> tuple:
        left, own, right = self._at(feed)
        if self.left:
            x, rx, received = _read(self.left.fwd, message, rx, self.x, left.fold(0))
        else:
            x, received = feed.x, None
        y, rest = self._run(variables, x, own)
        sent, out = None, None
        if self.right:
            out, tx, sent = _write(self.right.fwd, y, tx, right.fold(0))
        before = {name: variables[name] for name in rest}
        return y, Saved(x, before, received, sent), rest, out, rx, tx

    def _backward(
        self,
        total: Total,
        params: Any,
        feed: Feed,
        saved: Saved,
        message: Payload,
        rx: Any,
        tx: Any,
    ) -> tuple[Total, Payload, Any, Any]:
        left, own, right = self._at(feed)

        def run(params: Any, x: Array) -> tuple[Array, Any]:
            y, _ = self._run({'params': params, **saved.rest}, x, own)
            return self.loss(y, feed.y) if self.loss else (y, None)  # the last stage, or another

        y, pull, aux = jax.vjp(run, params, saved.x, has_aux=True)
        g, loss = jnp.ones_like(y), y
        if self.right:
            at = right.fold(1)._replace(support=saved.sent)
            g, rx, _ = _read(self.right.bwd, message, rx, like(y), at)
            loss = jnp.zeros_like(total.loss)
        grads, gx = pull(g)
        add = lambda t, a: t + (a * feed.share).astype(t.dtype)
        total = jax.tree.map(add, total, Total(loss, aux, grads))
        out = None
        if self.left:
            at = left.fold(1)._replace(support=saved.received)
            out, tx, _ = _write(self.left.bwd, gx, tx, at)
        return total, out, rx, tx


def _write(channel: Channel, x: Array, tx: Any, ctx: Ctx) -> tuple[Payload, Any, Any]:
    """The message (each array under a leading axis of 1, its end of a wire), state, support."""
    message, tx = channel.send(x, tx, ctx)
    known = channel.codec.support(message, like(x), ctx)
    return jax.tree.map(lambda a: a[None], message), tx, known


def _read(channel: Channel, message: Payload, rx: Any, x: Like, ctx: Ctx) -> tuple[Array, Any, Any]:
    message = jax.tree.map(lambda a: a[0], message)
    y, rx = channel.recv(message, rx, x, ctx)
    return y, rx, channel.codec.support(message, x, ctx)


def messages(b: Boundary, x: Like) -> tuple[Payload, Payload]:
    """Shapes of the forward and the backward message of a tensor like ``x``, leading axis 1."""

    def make(x: Array) -> tuple[Payload, Payload]:
        ctx = Ctx(jax.random.key(0), jnp.zeros(x.shape[:1], jnp.int32))
        forward, _, known = _write(b.fwd, x, b.fwd.init(like(x))[0], ctx)
        backward = b.bwd.init(like(x))[0]
        return forward, _write(b.bwd, x, backward, ctx._replace(support=known))[0]

    return jax.eval_shape(make, x)


def likes(stages: Any, x: Like, kwargs: Mapping[str, Any]) -> list[Like]:
    """What goes into each stage, and the output of the last."""
    found = [x]
    for stage in stages:

        def run(x: Array, stage: nn.Module = stage) -> Array:
            keys = {'params': jax.random.key(0), 'dropout': jax.random.key(0)}
            return stage.init_with_output(keys, x, **kwargs)[0]

        found.append(like(jax.eval_shape(run, found[-1])))
    return found
