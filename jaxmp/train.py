"""What is trained and how: the setting of a run, its state, a step, an epoch.

An epoch is a Python loop over a compiled step on CPU, where convolutions inside a scan are slow
(see `jaxmp.micro.loop`), and one compiled scan on an accelerator. Data order is a pure function of
(seed, epoch) and every key one of (seed, step), so a resumed run repeats to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxmp import data, exchange, micro
from jaxmp.boundary import Links, value_and_grad
from jaxmp.exchange import Collectives, Exchange
from jaxmp.feedback import Channel, warm
from jaxmp.models.tied import share, tie
from jaxmp.pipeline import Pipeline, pipeline
from jaxmp.spec import parse
from jaxmp.task import AUGMENT, MODELS, TASKS, Config, Task, once, task_of
from jaxmp.wire import Ctx, Like, nbytes

EVALUATIONS = ('carry', 'direct', 'frozen')
RUNTIMES = ('local', 'mpmd')
OPTIMISERS = ('sgd', 'adamw')
DTYPES = ('float32', 'bfloat16')


class TrainState(flax.struct.PyTreeNode):
    """Everything a step changes: one pytree, and what the checkpoint saves."""

    step: Any
    variables: Any
    opt_state: Any
    links: Any
    key: Array
    exchange: Any = ()


class Setting(NamedTuple):
    """What a run does not change: the data, the model in its two phases, the optimiser."""

    config: Config
    task: Task
    data: data.Dataset
    model: Pipeline
    warm_model: Pipeline
    optimiser: optax.GradientTransformation
    epoch_steps: int
    exchange: Exchange
    replicas: int


def setting(config: Config) -> Setting:
    """Loads the data and builds model and optimiser, with all the checks that need no compilation.

    Raises:
      ValueError: for a value that is not allowed; the message names the key.
    """
    check_choices(config)
    if not 0 <= config.warmup_epochs <= config.epochs:
        raise ValueError(
            f'config.warmup_epochs={config.warmup_epochs} is not between 0 and epochs='
            f'{config.epochs}; the warm-up counts inside the total'
        )
    task = task_of(config)
    found = task.data
    if config.train_examples:
        found = found._replace(train=data.take(found.train, config.train_examples))
    if config.get('test_examples', 0):
        found = found._replace(test=data.take(found.test, config.test_examples))
    examples = len(found.train.y)
    if not 1 <= config.batch_size <= examples:
        raise ValueError(f'config.batch_size={config.batch_size} is not in 1..{examples}')
    replicas, shared = replication(config)
    if config.micro_batches < 1 or config.batch_size // replicas % config.micro_batches:
        raise ValueError(
            f'config.micro_batches={config.micro_batches} does not divide config.batch_size='
            f'{config.batch_size}' + (f' / {replicas} replicas' if replicas > 1 else '') + '; a '
            'step takes that many equal cuts of its batch'
        )
    if config.clip_norm < 0:
        raise ValueError(f'config.clip_norm={config.clip_norm} is negative; 0 does not clip')
    fwd, bwd = (parse(str(config[k]), {'examples': examples}) for k in ('fwd', 'bwd'))
    if bwd.per_example:
        raise ValueError(f'config.bwd={config.bwd!r}: aqsgd is for activations; use ef or ef21')
    if fwd.per_example:
        check_ids(fwd, config.fwd, examples)
    epoch_steps = examples // config.batch_size
    model, warmed = (pipeline(task.stages, *c) for c in ((fwd, bwd), (warm(fwd), warm(bwd))))
    optimise = optimiser(config, epoch_steps)
    return Setting(
        config, task, found, model, warmed, optimise, epoch_steps, shared, replicas
    )  # fmt: skip


def replication(config: Config) -> tuple[int, Exchange]:
    """How many replicas there are, and how they share gradients.

    Raises:
      ValueError: if they do not divide the batch, the runtime has none, or the optimiser has a
        momentum that the exchange has too.
    """
    n, text = config.get('replicas', 1), str(config.get('exchange', 'mean'))
    if isinstance(n, bool) or n < 1 or config.batch_size % n:
        raise ValueError(
            f'config.replicas={n!r} does not divide config.batch_size={config.batch_size}; every '
            "replica takes an equal cut of a step's batch"
        )
    if n > 1 and config.runtime != 'local':
        raise ValueError(f'config.replicas={n} needs config.runtime=local, got {config.runtime!r}')
    shared = exchange.parse(text)
    if n > 1 and shared.momentum and config.get('momentum', 0.0):
        raise ValueError(
            f'config.exchange={text!r} has a momentum of its own, and config.momentum='
            f'{config.momentum} would add a second; set config.momentum=0'
        )
    return n, shared


def check_choices(config: Config) -> None:
    """Raises ValueError if a key has a value that is not one of its few."""
    for key, allowed in (
        ('runtime', RUNTIMES), ('model', (*MODELS, *TASKS)), ('augment', AUGMENT),
        ('eval_feedback', EVALUATIONS), ('optimiser', OPTIMISERS), ('dtype', DTYPES),
    ):  # fmt: skip
        if key in config and config[key] not in allowed:
            raise ValueError(f'config.{key}={config[key]!r} is not one of {", ".join(allowed)}')


def check_ids(fwd: Channel, text: str, examples: int) -> None:
    """Raises ValueError if the table of ``fwd`` has fewer rows than there are examples."""
    tx, _ = jax.eval_shape(lambda: fwd.init(jax.ShapeDtypeStruct((1, 1), jnp.float32)))
    if len(tx) < examples:
        raise ValueError(
            f'config.fwd={text!r} has buffers for {len(tx)} examples and the training set has '
            f'{examples}; write examples=examples'
        )


def optimiser(config: Config, epoch_steps: int) -> optax.GradientTransformation:
    """What ``config.optimiser`` names.

    ``sgd``: momentum, weight decay on all parameters, a cosine that moves once an epoch
    (``cosine_epochs=0``: a constant rate).
    ``adamw``: the rate falls linearly to 0 at the last step.
    """
    if config.optimiser == 'adamw':
        falling = optax.linear_schedule(config.lr, 0.0, config.epochs * epoch_steps)
        return optax.adamw(falling, weight_decay=config.get('weight_decay', 0.0))

    def rate(step: Any) -> Any:
        if not config.cosine_epochs:
            return config.lr
        epoch = step // epoch_steps
        return config.lr * 0.5 * (1 + jnp.cos(jnp.pi * epoch / config.cosine_epochs))

    decay = optax.add_decayed_weights(config.weight_decay)
    return optax.chain(decay, optax.sgd(rate, config.momentum))


def create(s: Setting) -> TrainState:
    """The state before the first step."""
    key = jax.random.key(s.config.seed)
    like, init = micro_like(s), jax.random.fold_in(key, 0)
    variables, links = s.model.init(init, jnp.zeros(like.shape, like.dtype), train=True)
    variables = tuple(s.task.start(i, v, init) for i, v in enumerate(variables))
    links = micro.link_slots(s.model.boundaries, links, s.config.micro_batches)
    opt_state = jax.jit(s.optimiser.init)(split(variables)[0])
    return TrainState(jnp.zeros((), jnp.int32), variables, opt_state, links, key)


def micro_like(s: Setting) -> Like:
    """Shape of a micro-batch of the model's input."""
    size = s.config.batch_size // s.replicas // s.config.micro_batches
    return jax.ShapeDtypeStruct((size, *s.task.like.shape), s.task.like.dtype)


def split(variables: Any) -> tuple[Any, Any]:
    """Parameters, and the other collections, of every stage."""
    params = tuple(v['params'] for v in variables)
    return params, tuple({k: v[k] for k in v if k != 'params'} for v in variables)


def join(params: Any, rest: Any) -> Any:
    """Inverse of `split`."""
    return tuple({'params': p, **r} for p, r in zip(params, rest, strict=True))


Others = tuple[Exchange, Collectives]  # how a replica shares its gradients, and with whom


def train_step(
    s: Setting,
    model: Pipeline,
    state: TrainState,
    batch: dict[str, Array],
    others: Others | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step; returns the next state, mean loss and accuracy of the batch.

    Args:
      s: the setting.
      model: in or after its warm-up.
      state: of this replica.
      batch: this replica's.
      others: the other replicas, if there are any.
    """
    key, ctx = step_keys(state.key, state.step, batch['id'])
    if others:
        key, ctx = jax.random.fold_in(key, others[1].index), ctx.fold(others[1].index)
    rest, links, means, grads = gradients(s, model, state, batch, (key, ctx))
    grads = tie(grads) if s.task.tied else grads
    held, params = state.exchange, split(state.variables)[0]
    if others:
        at = jax.random.fold_in(jax.random.fold_in(state.key, state.step + 1), 2)
        grads, held = others[0].apply(grads, held, at, others[1])
    squares = (square_norm(once(s.task, i, g)) for i, g in enumerate(grads))
    scale = clip_scale(s, sum(squares, jnp.zeros(())))
    params, opt_state = update(s, params, state.opt_state, grads, scale)
    if others:
        params, held = others[0].settle(params, held, others[1])
    params = share(params) if s.task.tied else params  # two equal updates may be fused in two ways
    variables = join(params, rest)
    return TrainState(state.step + 1, variables, opt_state, links, state.key, held), means


def gradients(
    s: Setting,
    model: Pipeline,
    state: TrainState,
    batch: dict[str, Array],
    at: tuple[Array, Ctx],
) -> tuple[Any, Links, dict[str, Array], Any]:
    """Both passes: statistics, feedback states, mean loss and accuracy, and the gradients.

    Args:
      s: the setting.
      model: in or after its warm-up.
      state: before the step.
      batch: of the step.
      at: key of the augmentation, and context of the model.
    """
    key, ctx = at
    x = s.task.prepare(batch['x'], key)
    params, rest = split(state.variables)
    cuts, micros = model.boundaries, s.config.micro_batches

    def one(rest: Any, links: Links, m: Array, x: Array, y: Array) -> Any:
        def loss(params: Any, links: Links) -> tuple[Array, tuple[Links, Any]]:
            at = micro.context(ctx, m, micros)
            logits, after, links = model.apply(join(params, rest), links, x, at, train=True)
            value, means = mean_score(s, logits, y)
            return value, (links, (means, split(after)[1]))

        (_, (means, rest)), grads, links = value_and_grad(loss)(params, links)
        return rest, links, (means, grads)

    def add(carry: Any, at: Any) -> Any:
        rest, kept, total = carry
        rest, links, new = one(rest, micro.take_links(cuts, kept, at[0]), *at)
        total = jax.tree.map(lambda t, a: t + a / micros, total, new)
        return rest, micro.put_links(cuts, kept, at[0], links), total

    parts = jnp.arange(micros), *(micro.cut(a, micros) for a in (x, batch['y']))
    first = jax.tree.map(lambda a: a[0], parts)
    shapes = jax.eval_shape(one, rest, micro.take_links(cuts, state.links, 0), *first)[2]
    start = rest, state.links, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    rest, links, (means, grads) = micro.loop(add, start, parts)
    return rest, links, means, grads


def step_keys(key: Array, step: Any, ids: Any) -> tuple[Array, Ctx]:
    """Randomness of the augmentation and of the model in the step after ``step``."""
    key = jax.random.fold_in(key, step + 1)
    return jax.random.fold_in(key, 0), Ctx(jax.random.fold_in(key, 1), ids)


def mean_score(s: Setting, logits: Array, y: Array) -> tuple[Array, dict[str, Array]]:
    """The loss of a micro-batch, and the means that are reported."""
    nll, right = s.task.score(logits, y)
    loss = jnp.mean(nll)
    return loss, {'loss': loss, 'accuracy': jnp.mean(right)}


def square_norm(tree: Any) -> Array:
    """Sum of squares of all leaves; summed over the stages, the square of the global norm."""
    return sum((jnp.vdot(a, a) for a in jax.tree.leaves(tree)), jnp.zeros(()))


def clip_scale(s: Setting, square: Any) -> Array:
    """What gradients of the given squared global norm are multiplied with."""
    if not s.config.clip_norm:
        return jnp.ones(())
    return jnp.minimum(1, s.config.clip_norm / (jnp.sqrt(square) + 1e-12))


def update(s: Setting, params: Any, opt_state: Any, grads: Any, scale: Any) -> tuple[Any, Any]:
    """The optimiser's step; the same for a stage alone and for all."""
    grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = s.optimiser.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


Values = dict[str, Any]  # loss and accuracy of one step, or of each of several
Stopped = Callable[[], bool]
Epoch = Callable[..., Iterator[tuple[TrainState, Values, bool]]]


def never() -> bool:
    """Nobody asked to stop."""
    return False


Step = Callable[[TrainState, dict[str, Array]], tuple[TrainState, dict[str, Array]]]


def model_at(s: Setting, epoch: int) -> Pipeline:
    """The model of an epoch: in its warm-up, or after it."""
    return s.warm_model if epoch < s.config.warmup_epochs else s.model


def epoch_by_step(s: Setting, step: Step) -> Epoch:
    """An epoch as a loop over a compiled step: the form for CPU."""
    step = jax.jit(step, donate_argnums=0)

    def run(state: TrainState, order: np.ndarray, stopped: Stopped = never) -> Iterator:
        for batch in data.batches(s.data.train, s.config.batch_size, order):
            state, values = step(state, batch)
            yield state, values, stopped()

    return run


def epoch_by_scan(s: Setting, step: Step) -> Epoch:
    """An epoch inside one compiled scan, the data on the device: the form for accelerators."""
    held = tuple(jnp.asarray(a) for a in s.data.train)

    @functools.partial(jax.jit, donate_argnums=0)
    def scan(state: TrainState, x: Array, y: Array, rows: Array) -> Any:
        def one(state: TrainState, at: Array) -> tuple[TrainState, dict[str, Array]]:
            return step(state, {'x': x[at], 'y': y[at], 'id': at})

        return jax.lax.scan(one, state, rows)

    def run(state: TrainState, order: np.ndarray, stopped: Stopped = never) -> Iterator:
        steps = len(order) // s.config.batch_size
        rows = order[: steps * s.config.batch_size].reshape(steps, -1)
        state, values = scan(state, *held, rows)
        yield state, values, stopped()

    return run


def epoch_form() -> Callable[[Setting, Step], Epoch]:
    """How an epoch runs on this backend."""
    return epoch_by_step if jax.default_backend() == 'cpu' else epoch_by_scan


def message_bytes(s: Setting) -> list[dict[str, int]]:
    """Bytes a step at each boundary: uncompressed, and each way as sent after the warm-up."""
    x, micros = micro_like(s), s.config.micro_batches
    variables, _ = shapes(s)
    rows = []
    likes = s.model.likes(variables, x, train=True)
    for i, (b, x) in enumerate(zip(s.model.boundaries, likes, strict=True), 1):
        forward, backward = (micros * n // 8 for n in b.bits(x))
        full = micros * nbytes(x)
        row = {'boundary': i, 'uncompressed': full, 'forward': forward, 'backward': backward}
        rows.append(row)
    return rows


def shapes(s: Setting) -> tuple[Any, Links]:
    """Variables of all stages and states of all boundaries, as shapes."""
    init = functools.partial(s.model.init, train=True)
    return jax.eval_shape(init, jax.random.key(0), micro_like(s))


def parameters(s: Setting) -> int:
    """How many there are."""
    return sum(p.size for p in jax.tree.leaves(split(shapes(s)[0])[0]))
