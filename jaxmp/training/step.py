"""`train_step`: one optimizer step, the same over every runtime.

Both passes are the runtime's; what follows is per group of parameters (`jaxmp.training.groups`):
replicas exchange gradients, the norm over all stages decides how they are clipped, the optimizer
changes the parameters, and replicas may meet once more. A function of one stage runs where the
stage is (`Runtime.at`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from jaxmp.exchange import Collectives, Exchange
from jaxmp.exchange.collectives import Grads, Params, Tree, known_after
from jaxmp.exchange.layout import State
from jaxmp.exchange.settled import reduced
from jaxmp.runtimes.state import squared_norm
from jaxmp.runtimes.types import Batch, ByReplica, ModelState, Runtime, each
from jaxmp.training.across import Across, Squares
from jaxmp.training.clipping import OptState, WholeNorm, clip_scale, scaled
from jaxmp.training.groups import (
    Groups,
    by_home,
    by_stage,
    copied,
    is_first,
    joined,
    of_groups,
    split,
)
from jaxmp.training.late import mixed
from jaxmp.training.optimizer import Optimizer


class TrainState(flax.struct.PyTreeNode):
    """Everything a step changes: one pytree, and what a checkpoint saves.

    Attributes:
      step: steps done.
      model: parameters, statistics and feedback states.
      opt_state: of each stage's optimizer.
      exchange: of each stage's exchange between replicas.
      key: of the whole run.
      copies: of the sum of the gradients of a group's copies, where they are apart; by stage.
      waiting: by stage the gradients of the last N steps, the oldest first, where they move its
        parameters N steps later; without those that a runtime has not computed yet.
    """

    step: Array
    model: ModelState
    opt_state: dict[int, list[OptState]]
    exchange: dict[int, list[State]]
    key: Array
    copies: State = ()
    waiting: dict[int, tuple[Grads, ...]] = flax.struct.field(default_factory=dict)


_BY_REPLICA: PyTree = dict.fromkeys(('model', 'opt_state', 'exchange', 'copies', 'waiting'), True)
PER_REPLICA = TrainState(step=False, key=False, **_BY_REPLICA)  # pyright: ignore


class Rules(NamedTuple):
    """What a step does with the gradients.

    Attributes:
      groups: the parameters that are trained, and how each group is exchanged and updated.
      clip_norm: largest global norm over all stages; 0 does not clip.
      delays: steps after which gradients move the parameters, by stage; none where all are on time.
        All that follows from them, such as their norm, is then computed in that step; the first N
        steps, of the largest one, do none of it.
    """

    groups: Groups
    clip_norm: float = 0.0
    delays: tuple[int, ...] = ()

    @property
    def delay(self) -> int:
        """N, the largest one."""
        return max(self.delays, default=0)

    @property
    def apart(self) -> bool:
        """Whether a step has gradients of several batches, so that each group clips its own."""
        return mixed(self.delays)

    @property
    def normed(self) -> bool:
        """Whether a step needs the global norm."""
        if self.apart:
            return False
        return bool(self.clip_norm) or any(isinstance(g.optimizer, WholeNorm) for g in self.groups)


def create(
    rules: Rules,
    runtime: Runtime,
    across: Across,
    key: Array,
    model: ModelState | None = None,
) -> TrainState:
    """The state before the first step.

    Args:
      rules: what is done with the gradients.
      runtime: how the stages run.
      across: what is needed over all stages.
      key: of the run.
      model: that of the stages, if it is not the runtime's own.

    Raises:
      ValueError: as `jaxmp.training.groups.split`.
    """
    model = model or runtime.init(jax.random.fold_in(key, 0))
    opt_state, exchange = {}, {}
    for home, params in split(rules.groups, model.params).items():
        stage, group = home
        opt_state[home] = runtime.at(stage, _initialize(group.optimizer), params)
        init = _first(group.exchange)
        exchange[home] = () if across.follows(home) else runtime.at(stage, init, params)
    states = by_stage(opt_state), by_stage(exchange)
    form = of_groups(rules.groups, model.params) if rules.delay else {}
    zeros = lambda s, tree: runtime.at(s, _zeros, tree)  # arrays of their own: a step donates them
    late = {s: rules.delays[s] for s in form if rules.delays[s]}
    waiting = {s: tuple(zeros(s, form[s]) for _ in range(n)) for s, n in late.items()}
    return TrainState(jnp.zeros((), jnp.int32), model, *states, key, across.init(), waiting)


def train_step(
    rules: Rules, runtime: Runtime, across: Across, inputs: tuple[TrainState, Batch]
) -> tuple[TrainState, PyTree]:
    """The next state, and the means of the batch, of each replica that has the last stage here.

    Args:
      rules: what is done with the gradients.
      runtime: how the stages run.
      across: what is needed over all stages.
      inputs: the state before, and the batch of all replicas of the runtime.
    """
    state, batch = inputs
    key = jax.random.fold_in(state.key, state.step + 1)
    means, new, model = runtime.value_and_grad(state.model, batch, key)
    # The norm of gradients that have just come may be known, if nothing changes them until here.
    unchanged = not (any(state.waiting.values()) or across.together or copied(rules.groups))
    square = runtime.square if unchanged else None
    own = {s: (new[s],) if s in new else () for s in model.params}
    rows = {s: (*state.waiting.get(s, ()), *row) for s, row in own.items()}
    grads = {s: row[0] for s, row in rows.items()}
    state = state.replace(model=model, waiting={s: rows[s][1:] for s in state.waiting})
    apply = functools.partial(updated, rules, runtime, across, (key, square))
    if not rules.delay:
        state = apply(state, grads)
    elif across.together:
        idle = lambda state, grads: state
        state = jax.lax.cond(state.step < rules.delay, idle, apply, state, grads)
    elif state.step >= rules.delay:
        state = apply(state, grads)
    return state.replace(step=state.step + 1), means


def updated(
    rules: Rules,
    runtime: Runtime,
    across: Across,
    about: tuple[Array, Callable[[], Array] | None],
    state: TrainState,
    grads: dict[int, Grads],
) -> TrainState:
    """The state after gradients have moved the parameters.

    Args:
      rules: what is done with the gradients.
      runtime: how the stages run.
      across: what is needed over all stages.
      about: key of the step, and the squared norm of all gradients, if it is known.
      state: before.
      grads: by stage.
    """
    (key, squares_sum), groups, copies = about, rules.groups, state.copies
    if copied(groups):  # streams 0 and 1 of a step are the model's, 2 the replicas'
        grads, copies = across.tie(grads, copies, jax.random.fold_in(key, 3))
    words = jax.random.key_data(jax.random.fold_in(key, 2))
    gradients, params = split(groups, grads), split(groups, state.model.params)
    opt_state, exchange = by_home(groups, state.opt_state), by_home(groups, state.exchange)

    squares: Squares = {s: [] for s in runtime.stages}
    asks = rules.normed and squares_sum is None
    for home in gradients:
        stage, group = home
        if across.follows(home):
            gradients[home] = gradients[group.homes[0], group]
            continue
        share, stream = _exchanged(group.exchange, asks), jnp.uint32(group.stream)
        alone = (0,) if len(group.homes) == 1 else ()  # copies may be one array
        row = runtime.at(stage, share, gradients[home], exchange[home], words, stream, spent=alone)
        gradients[home], exchange[home], square = parts(row)
        if is_first(home):  # equal copies count once
            squares[stage].append(square)

    scale, square = np.float32(1), np.float32(0)
    if rules.normed:
        square = across.total(squares) if squares_sum is None else squares_sum()
    if rules.clip_norm and not rules.apart:
        scale = clip_scale(rules.clip_norm, square)

    earlier: Tree = ()
    for home in params:
        stage, group = home
        if across.together and group.exchange.shares_params:
            params[home] = known_after(params[home], earlier)
        own = rules.clip_norm if rules.apart else 0.0
        update = _updated(group.optimizer, None if across.follows(home) else group.exchange, own)
        trees = params[home], opt_state[home], gradients[home], exchange[home]
        stream = jnp.uint32(group.stream)
        row = runtime.at(stage, update, *trees, (scale, square), words, stream, spent=(1,))
        params[home], opt_state[home], exchange[home] = parts(row)
        earlier = params[home], exchange[home]

    model = state.model._replace(params=across.share(joined(state.model.params, params)))
    return state.replace(
        model=model, opt_state=by_stage(opt_state), exchange=by_stage(exchange), copies=copies
    )


def parts(triple: tuple[Tree, Tree, Tree] | ByReplica) -> tuple[Tree, Tree, Tree]:
    """A triple; of triples by replica, the three by replica."""
    if not isinstance(triple, ByReplica):
        return triple
    return tuple(each(lambda t, i=i: t[i], triple) for i in range(3))  # pyright: ignore


# Functions of one replica of a stage; cached, so that each is compiled once.


@functools.lru_cache(maxsize=16)
def _initialize(optimizer: Optimizer) -> Callable[[Collectives | None, Params], OptState]:
    return lambda via, params: optimizer.init(params)


def _zeros(via: Collectives | None, params: Params) -> Grads:
    return jax.tree.map(jnp.zeros_like, params)


@functools.lru_cache(maxsize=16)
def _first(exchange: Exchange) -> Callable[[Collectives | None, Params], State]:
    return lambda via, params: exchange.init(params, via.size) if via else ()


@functools.lru_cache(maxsize=16)
def _exchanged(exchange: Exchange, norm: bool) -> Callable[..., tuple[Grads, State, Array]]:
    """The shared gradients, the next state, and the squared norm where it is asked for."""

    def run(
        via: Collectives | None, grads: Grads, memory: State, words: Array, stream: Array
    ) -> tuple[Grads, State, Array]:
        if via:
            grads, memory = reduced(exchange, grads, memory, _key(words, stream), via)
        return grads, memory, squared_norm(grads if norm else ())

    return run


@functools.lru_cache(maxsize=16)
def _updated(
    optimizer: Optimizer, exchange: Exchange | None, own: float = 0.0
) -> Callable[..., tuple[Params, OptState, State]]:
    """The next parameters, optimizer state and exchange state.

    Args:
      optimizer: of the group.
      exchange: None leaves it out.
      own: largest norm of the group by itself; 0 takes the scale of all groups.
    """

    def run(via: Collectives | None, *operands: PyTree) -> tuple[Params, OptState, State]:
        params, opt_state, grads, memory, norm, words, stream = operands
        scale, square = (a[via.index] if via and a.ndim else a for a in norm)
        grads = scaled(grads, clip_scale(own, squared_norm(grads)) if own else scale)
        if isinstance(optimizer, WholeNorm):
            others = jnp.sqrt(jnp.maximum(0, square * scale**2 - squared_norm(grads)))
            updates, opt_state = optimizer.update(grads, others, opt_state, params)
        else:
            updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if via and exchange:
            params, memory = exchange.after_update(params, memory, _key(words, stream), via)
        return params, opt_state, memory

    return run


def _key(words: Array, stream: Array) -> Array:
    """The key of a step for a group."""
    return jax.random.fold_in(jax.random.wrap_key_data(words), stream)
