"""Equal stages over a mesh: one program for all devices, packed payloads between neighbours.

Device s of the mesh axis ``'stage'`` holds stage s. The step is 1F1B as one scan: in tick t the
device takes micro-batch ``t - s`` forward and micro-batch ``t - 2(S-1) + s`` backward, if there are
such, and two collective-permutes move the messages that the next tick reads. Backward recomputes
the stage from its saved input. An input is saved for ``2(S-1-s)`` ticks, so a ring of ``2S-1`` of
them is enough: memory does not grow with the number of micro-batches M (GPipe's does).

The embedding runs on the first device and head and loss on the last, under `jax.lax.cond`. Their
parameters are stacked along the devices as those of the stages are, zero where they are not used:
no device needs the gradient of another, and zero slices add nothing to a global norm. Besides the
messages, one all-reduce of the scalar loss travels.

Each end of a channel keeps its state on its own device, in M slots, one a micro-batch, so that no
schedule changes a result; a channel whose state is indexed by example has one table for all. In a
tick without work the state stays frozen, the tensor is masked before it is encoded, and the
receiver, which knows the schedule, does not read what comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmp.boundary import Links, boundary
from jaxmp.feedback import Channel
from jaxmp.micro import Index, cut, put, slots, take
from jaxmp.schedule import Task, saved_inputs, size
from jaxmp.transport import ppermute
from jaxmp.wire import Ctx, Like, Payload, like

AXIS = 'stage'
Params = dict[str, Any]


class Parts(NamedTuple):
    """A model for `spmd`.

    Attributes:
      first: embedding of the input; runs on the first device.
      stages: equal modules, one a device; each keeps shape and dtype.
      last: head; runs on the last device.
      loss: ``(output, y) -> scalar``, a mean over the samples.
    """

    first: nn.Module
    stages: tuple[nn.Module, ...]
    last: nn.Module
    loss: Callable[[Array, Array], Array]


class _Carry(NamedTuple):
    """What a device takes from tick to tick."""

    act: Payload  # arrived: the next activation
    grad: Payload  # arrived: the next gradient
    ring: Any  # stage inputs, and the supports received and sent with them
    links: Links
    total: Any  # loss and gradients so far


@dataclass(frozen=True)
class Spmd:
    """A model over the devices of a mesh; see `spmd`."""

    parts: Parts
    fwd: Channel
    bwd: Channel
    mesh: Mesh
    micro: int

    def init(self, key: Array, x: Array) -> tuple[Params, Links]:
        """Parameters and feedback states, each slice on its device.

        Args:
          key: randomness of the initial parameters.
          x: an input of the training batch's shape.

        Returns:
          ``{'first', 'stages', 'last'}``, every array ``(S, ...)`` (``first`` is zero but in slice
          0, ``last`` but in slice S - 1), and `Links` of arrays ``(S, M, ...)``, or ``(S, ...)``
          where the state is per example.

        Raises:
          ValueError: if the batch does not divide into micro-batches, a stage changes shape or
            dtype, or a module has variables besides parameters.
        """
        place = NamedSharding(self.mesh, P(AXIS))
        return jax.jit(self.fresh, out_shardings=place)(key, x)

    def value_and_grad(
        self, params: Params, links: Links, x: Array, y: Array, ctx: Ctx | None = None
    ) -> tuple[Array, Params, Links]:
        """Loss and gradients, means over the micro-batches, and the advanced states.

        Micro-batch m is the m-th of M equal cuts of the batch. Its context is ``ctx.fold(m)`` with
        its ids, folded from there as `jaxmp.Pipeline.apply` does: both give the same numbers (but
        for dropout next to ``first`` and ``last``, which Flax draws by the path of a module).

        Args:
          params: from `init`.
          links: from `init` or the last step.
          x: input, ``(B, ...)``.
          y: targets, ``(B, ...)``.
          ctx: key and ids of this step.

        Raises:
          ValueError: as `init`, or if ``links`` were made for other shapes.
        """
        self.check(links, self.crossing(params, x))

        def device(params: Params, links: Links, batch: tuple[Array, Array, Ctx]) -> Any:
            loss, *slices = self.local(_at(params, 0), _at(links, 0), *batch)
            return loss, *jax.tree.map(lambda a: a[None], slices)

        run = jax.shard_map(
            device,
            mesh=self.mesh,
            in_specs=(P(AXIS), P(AXIS), P()),
            out_specs=(P(), P(AXIS), P(AXIS)),
        )
        return run(params, links, (x, y, Ctx() if ctx is None else ctx))

    def local(
        self, params: Params, links: Links, x: Array, y: Array, ctx: Ctx
    ) -> tuple[Array, Params, Links]:
        """`value_and_grad` of one device, inside a `jax.shard_map` over an axis ``'stage'``.

        Args:
          params: this device's slice.
          links: this device's slice.
          x: input, ``(B, ...)``, the same along the axis; so are ``y`` and ``ctx``.
          y: targets, ``(B, ...)``.
          ctx: key and ids of this step.
        """
        x, y = cut(x, self.micro), cut(y, self.micro)
        ids = None if ctx.ids is None else cut(ctx.ids, self.micro)
        h = self._stage_input(params, x)
        plan = tasks(len(self.parts.stages), self.micro)
        batch, saved = (x, y, ctx._replace(ids=ids)), max(saved_inputs(plan))
        dev = _Device(self, params, batch, h, lax.axis_index(AXIS), saved)
        end, _ = lax.scan(dev.tick, dev.start(links), _table(plan))
        loss, grads = jax.tree.map(lambda a: a / self.micro, end.total)
        return lax.psum(loss, AXIS), grads, end.links

    def bits(self, x: Array | Like) -> tuple[int, int]:
        """Bits of one forward and one backward message, for a batch like ``x``."""
        _, h = jax.eval_shape(self._params, jax.random.key(0), x)
        return boundary(self.fwd, self.bwd).bits(h)

    def modules(self) -> tuple[nn.Module, ...]:
        """The same model as stages of `jaxmp.pipeline`: first and last joined to their stages."""
        rows = [[stage] for stage in self.parts.stages]
        rows[0].insert(0, self.parts.first)
        rows[-1].append(self.parts.last)
        return tuple(nn.Sequential(row) for row in rows)

    def variables(self, params: Params) -> tuple[dict, ...]:
        """``params``, or their gradients, as the variables of a pipeline of `modules`."""
        n = len(self.parts.stages)
        rows = [[_at(params['stages'], i)] for i in range(n)]
        rows[0].insert(0, _at(params['first'], 0))
        rows[-1].append(_at(params['last'], n - 1))
        return tuple({'params': {f'layers_{i}': p for i, p in enumerate(r)}} for r in rows)

    # Shapes and checks.

    def _params(self, key: Array, x: Array) -> tuple[Params, Array]:
        first, stages, last, _ = self.parts
        n = len(stages)
        keys = [jax.random.fold_in(key, i) for i in range(n + 2)]
        h, of_first = _parameters('first', first, keys[n], cut(x, self.micro)[0])
        out, _ = _parameters('stages', stages[0], keys[0], h)
        _check_kept(h, out)
        make = lambda key: _parameters('stages', stages[0], key, h)[1]
        _, of_last = _parameters('last', last, keys[n + 1], out)
        alone = lambda a, i: jnp.zeros((n, *a.shape), a.dtype).at[i].set(a)
        params = {
            'first': jax.tree.map(partial(alone, i=0), of_first),
            'stages': jax.vmap(make)(jnp.stack(keys[:n])),
            'last': jax.tree.map(partial(alone, i=n - 1), of_last),
        }
        return params, h

    def fresh(self, key: Array, x: Array) -> tuple[Params, Links]:
        """What `init` places on the devices."""
        params, h = self._params(key, x)
        return params, self._links(h)

    def _links(self, h: Array | Like) -> Links:
        def stack(channel: Channel) -> Any:
            state = slots(channel, channel.init(like(h)), self.micro)
            n = len(self.parts.stages)
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), state)

        return Links(stack(self.fwd), stack(self.bwd))

    def crossing(self, params: Params, x: Array | Like) -> Like:
        """What crosses a boundary, for all slices of the parameters and a batch like ``x``."""
        slice_of = jax.eval_shape(lambda p: _at(p, 0), params)
        return self._stage_input(slice_of, jax.eval_shape(lambda x: cut(x, self.micro), x))

    def _stage_input(self, params: Params, x: Array | Like) -> Like:
        def both(params: Params, x: Array) -> tuple[Array, Array]:
            first, stages, ctx = *self.parts[:2], Ctx(jax.random.key(0))
            h = _apply(first, params['first'], x[0], ctx)
            return h, _apply(stages[0], params['stages'], h, ctx)

        h, out = jax.eval_shape(both, params, x)
        _check_kept(h, out)
        return like(h)

    def check(self, links: Links, h: Like) -> None:
        """Raises ValueError unless ``links`` are for messages like ``h``."""
        shapes = lambda tree: jax.tree.map(lambda a: a.shape, tree)
        want = shapes(jax.eval_shape(lambda: self._links(h)))
        if shapes(links) != want:
            raise ValueError(
                f'links were made for buffers {shapes(links)}, {self.micro} micro-batches of '
                f'shape {h.shape} need {want}: keep batch size and micro, or make new links with '
                'init'
            )


@dataclass(frozen=True)
class _Device:
    """One device's part of a step."""

    pipe: Spmd
    params: Params
    batch: tuple[Array, Array, Ctx]  # x, y and ids are cut into micro-batches
    h: Like
    s: Index
    saved: int

    @property
    def last(self) -> int:
        return len(self.pipe.parts.stages) - 1

    def at(self, m: Index) -> Ctx:
        """The context of micro-batch m."""
        ctx = self.batch[2]
        return ctx.fold(m)._replace(ids=None if ctx.ids is None else ctx.ids[m])

    def edges(self, m: Index, way: int) -> tuple[Ctx, Ctx]:
        """Contexts of the boundaries before and after the stage, forward (0) or backward (1)."""
        ctx = self.at(m)
        return ctx.fold(2 * self.s).fold(way), ctx.fold(2 * self.s + 2).fold(way)

    def start(self, links: Links) -> _Carry:
        """Zeros of every shape of the carry."""
        fwd, bwd = self.pipe.fwd, self.pipe.bwd

        def shapes() -> Any:
            x, ctx = _zeros(self.h), self.at(0)
            act = fwd.send(x, take(fwd, links.fwd[0], 0), ctx)[0]
            known = fwd.codec.support(act, self.h, ctx)
            grad = bwd.send(x, take(bwd, links.bwd[0], 0), ctx._replace(support=known))[0]
            ring = jax.tree.map(lambda a: jnp.stack([a] * self.saved), (x, known, known))
            return act, grad, ring, (self.run(self.params, x, 0)[1], self.params)

        act, grad, ring, total = jax.tree.map(_zeros, jax.eval_shape(shapes))
        return _Carry(act, grad, ring, links, total)

    def tick(self, c: _Carry, row: Array) -> tuple[_Carry, None]:
        """One forward and one backward, of the micro-batches that the schedule names."""
        forward, backward = row[:, self.s]
        return self.backward(self.forward(c, forward), backward), None

    def body(self, params: Params, x: Array, m: Index) -> Array:
        """The stage, on the first device after the embedding."""
        first, stages = self.pipe.parts[:2]
        ctx = self.at(m).fold(2 * self.s + 1)
        embed = lambda p, x: _apply(first, p, self.batch[0][m], ctx)
        x = lax.cond(self.s == 0, embed, lambda p, x: x, params['first'], x)
        return _apply(stages[0], params['stages'], x, ctx)

    def run(self, params: Params, x: Array, m: Index) -> tuple[Array, Array]:
        """The stage's output, and on the last device the loss (elsewhere 0)."""
        out = self.body(params, x, m)
        ctx = self.at(m).fold(2 * self.s + 1)

        def loss(p: Params, out: Array) -> Array:
            return self.pipe.parts.loss(_apply(self.pipe.parts.last, p, out, ctx), self.batch[1][m])

        zero = lambda p, out: _zeros(jax.eval_shape(loss, p, out))
        return out, lax.cond(self.s == self.last, loss, zero, params['last'], out)

    def forward(self, c: _Carry, m: Index) -> _Carry:
        """Reads the activation of micro-batch m, saves it, runs the stage, sends its output."""
        on, m = m >= 0, jnp.maximum(m, 0)
        fwd, (tx, rx), (before, after) = self.pipe.fwd, c.links.fwd, self.edges(m, 0)
        x, rx = _recv(fwd, c.act, rx, (m, on & (self.s > 0)), (self.h, before))
        out = jnp.where(on, self.body(self.params, x, m), 0)
        message, tx = _send(fwd, out, tx, (m, on & (self.s < self.last)), after)
        known = fwd.codec.support
        saved = x, known(c.act, self.h, before), known(message, self.h, after)
        ring = _put(c.ring, m % self.saved, saved, on)
        act = ppermute(AXIS, self.last + 1).forward(message)
        return c._replace(act=act, ring=ring, links=c.links._replace(fwd=(tx, rx)))

    def backward(self, c: _Carry, m: Index) -> _Carry:
        """Reads the gradient of micro-batch m, recomputes the stage, sends its input's gradient."""
        on, m = m >= 0, jnp.maximum(m, 0)
        bwd, (tx, rx), (before, after) = self.pipe.bwd, c.links.bwd, self.edges(m, 1)
        x, received, sent = _at(c.ring, m % self.saved)
        after, before = after._replace(support=sent), before._replace(support=received)
        g, rx = _recv(bwd, c.grad, rx, (m, on & (self.s < self.last)), (self.h, after))
        (_, loss), pull = jax.vjp(lambda p, x: self.run(p, x, m), self.params, x)
        grads, g = pull((jnp.where(self.s < self.last, g, 0), jnp.ones_like(loss)))
        g = jnp.where(on, g, 0)
        message, tx = _send(bwd, g, tx, (m, on & (self.s > 0)), before)
        total = jax.tree.map(lambda a, b: a + jnp.where(on, b, 0), c.total, (loss, grads))
        grad = ppermute(AXIS, self.last + 1).backward(message)
        return c._replace(grad=grad, total=total, links=c.links._replace(bwd=(tx, rx)))


def _zeros(like: Like) -> Array:
    return lax.pcast(jnp.zeros(like.shape, like.dtype), AXIS, to='varying')


def _at(tree: Any, i: Index) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


def _put(slots: Any, i: Index, new: Any, on: Array) -> Any:
    return jax.tree.map(lambda a, b: a.at[i].set(jnp.where(on, b, a[i])), slots, new)


def _send(
    channel: Channel, x: Array, kept: Any, task: tuple[Index, Array], ctx: Ctx
) -> tuple[Payload, Any]:
    old, at = _slot(channel, kept, task[0], ctx)
    message, new = channel.send(x, old, at)
    return message, _keep(channel, kept, (old, new), task, ctx)


def _recv(
    channel: Channel, message: Payload, kept: Any, task: tuple[Index, Array], at: tuple[Like, Ctx]
) -> tuple[Array, Any]:
    old, ctx = _slot(channel, kept, task[0], at[1])
    x, new = channel.recv(message, old, at[0], ctx)
    return x, _keep(channel, kept, (old, new), task, at[1])


def _slot(channel: Channel, kept: Any, m: Index, ctx: Ctx) -> tuple[Any, Ctx]:
    """What a message of micro-batch m meets: its slot, or of a table its examples' rows."""
    if not channel.per_example or ctx.ids is None:
        return take(channel, kept, m), ctx
    rows = lambda a: a.at[_within(a, ctx.ids)].get(mode='fill', fill_value=jnp.nan)
    return jax.tree.map(rows, kept), ctx._replace(ids=jnp.arange(len(ctx.ids)))


def _within(table: Array, ids: Any) -> Array:
    """Rows of the examples; of an id that the table does not have, one that is not there."""
    return jnp.where(ids < 0, len(table), ids)


def _keep(
    channel: Channel, kept: Any, states: tuple[Any, Any], task: tuple[Index, Array], ctx: Ctx
) -> Any:
    """``kept`` with the new one of two states of `_slot`, or in a tick without work the old one."""
    (old, new), (m, on) = states, task
    new = jax.tree.map(lambda a, b: jnp.where(on, b, a), old, new)
    if not channel.per_example:
        return put(channel, kept, m, new)
    return jax.tree.map(lambda a, b: a.at[_within(a, ctx.ids)].set(b), kept, new)


def _apply(module: nn.Module, params: Params, x: Array, ctx: Ctx) -> Any:
    rngs = {} if ctx.key is None else {'dropout': ctx.key}
    return module.apply({'params': params}, x, rngs=rngs)


def _parameters(name: str, module: nn.Module, key: Array, x: Array) -> tuple[Array, Params]:
    out, made = module.init_with_output({'params': key, 'dropout': key}, x)
    made = dict(made)
    if others := set(made) - {'params'}:
        raise ValueError(
            f'{name} has variables {sorted(others)} besides params, which a stage that is '
            'recomputed would update twice; use LayerNorm for BatchNorm, or the mpmd runtime'
        )
    return out, made.get('params', {})


def _check_kept(h: Array, out: Array) -> None:
    if (h.shape, h.dtype) != (out.shape, out.dtype):
        raise ValueError(
            f'a stage made {out.dtype}{list(out.shape)} of {h.dtype}{list(h.shape)}; equal stages '
            'keep shape and dtype, so put what changes them into first or last, or use mpmd'
        )


def tasks(stages: int, micros: int) -> tuple[Task, ...]:
    """The scan's schedule: 1F1B with one forward and one backward a scan tick.

    ``F(s, m)`` in scan tick ``s + m``, ``B(s, m)`` in ``2 (S - 1) - s + m``. `one_f_one_b` has one
    task a tick, which here would make every device wait for the longer of the two: all devices go
    in step. The price is twice the saved inputs, ``2 (S - 1 - s) + 1``.

    Args:
      stages: S.
      micros: M.

    Returns:
      Tasks, the forward of scan tick t at tick ``2 t``, its backward at ``2 t + 1``.

    >>> from jaxmp.schedule import saved_inputs
    >>> saved_inputs(tasks(4, 100))
    (7, 5, 3, 1)
    """
    cells = [(s, m) for s in range(stages) for m in range(micros)]
    forward = [Task(2 * (s + m), s, m, 'F') for s, m in cells]
    backward = [Task(2 * (2 * (stages - 1) - s + m) + 1, s, m, 'B') for s, m in cells]
    return tuple(sorted(forward + backward))


def _table(plan: tuple[Task, ...]) -> Array:
    """Micro-batches ``(scan ticks, F or B, stages)``, -1 for none."""
    stages, _, ticks = size(plan)
    table = np.full((-(-ticks // 2), 2, stages), -1, np.int32)
    for t in plan:
        table[t.tick // 2, t.tick % 2, t.stage] = t.micro
    return jnp.asarray(table)


def spmd(parts: Parts, fwd: Channel, bwd: Channel, mesh: Mesh, micro: int = 1) -> Spmd:
    """A model of equal stages, one a device of ``mesh``.

    Args:
      parts: embedding, stages, head and loss.
      fwd: channel of the activations.
      bwd: channel of their gradients.
      mesh: devices along one axis ``'stage'``; see `jaxmp.devices.device_mesh`.
      micro: micro-batches a step, M.

    Raises:
      TypeError: if ``fwd`` or ``bwd`` is not a channel.
      ValueError: if the mesh has other axes or not one device a stage, the stages differ, or
        ``micro`` is not a positive integer.
    """
    boundary(fwd, bwd)
    if mesh.axis_names != (AXIS,):
        raise ValueError(f"spmd needs a mesh of one axis 'stage', got {mesh.axis_names}")
    if len(parts.stages) != mesh.size:
        raise ValueError(
            f'{len(parts.stages)} stages on a mesh of {mesh.size} devices; one stage a device: '
            f'use device_mesh(stage={len(parts.stages)}), or cut the model into {mesh.size} stages'
        )
    if any(stage != parts.stages[0] for stage in parts.stages):
        raise ValueError(
            'the stages differ, and one program runs them all; put what differs into first or '
            'last, or use the mpmd runtime'
        )
    if isinstance(micro, bool) or not isinstance(micro, int) or micro < 1:
        raise ValueError(f'micro {micro!r} is not a number of micro-batches; give 1 or more')
    return Spmd(parts._replace(stages=tuple(parts.stages)), fwd, bwd, mesh, micro)
