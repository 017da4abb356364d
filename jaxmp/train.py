"""Trains a pipeline under compression: state, step, evaluation, the run from start to summary.

One linear `run`. An epoch is a Python loop over a compiled step on CPU, where convolutions inside a
scan are some twenty times slower, and one compiled scan on an accelerator. Data order is a pure
function of (seed, epoch) and every key one of (seed, step), so a resumed run repeats to the bit.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxmp import data, models
from jaxmp.boundary import Boundary, Links, value_and_grad
from jaxmp.checkpoint import Checkpoints, WorkdirError, claim
from jaxmp.feedback import Channel, direct, warm
from jaxmp.log import Display, Metrics, duration, provenance, show
from jaxmp.pipeline import Pipeline, pipeline
from jaxmp.report import curves
from jaxmp.spec import parse
from jaxmp.wire import Ctx, nbytes

MODELS = {'resnet18': models.resnet18}
AUGMENT = ('none', 'crop_flip')
EVALUATIONS = ('carry', 'direct', 'frozen')


class TrainState(flax.struct.PyTreeNode):
    """Everything a step changes: one pytree, and what the checkpoint saves."""

    step: Array
    variables: Any
    opt_state: Any
    links: Links
    key: Array


class Setting(NamedTuple):
    """What a run does not change: the data, the model in its two phases, the optimiser."""

    config: ml_collections.ConfigDict
    data: data.Dataset
    model: Pipeline
    warm_model: Pipeline
    optimiser: optax.GradientTransformation
    epoch_steps: int


class Diverged(RuntimeError):
    """The loss is not finite; the last checkpoint is from before."""


def setting(config: ml_collections.ConfigDict) -> Setting:
    """Loads the data and builds model and optimiser, with all the checks that need no compilation.

    Raises:
      ValueError: for a value that is not allowed; the message names the key.
    """
    for key, allowed in (
        ('model', tuple(MODELS)), ('augment', AUGMENT), ('eval_feedback', EVALUATIONS)
    ):  # fmt: skip
        if config[key] not in allowed:
            raise ValueError(f'config.{key}={config[key]!r} is not one of {", ".join(allowed)}')
    if not 0 <= config.warmup_epochs <= config.epochs:
        raise ValueError(
            f'config.warmup_epochs={config.warmup_epochs} is not between 0 and epochs='
            f'{config.epochs}; the warm-up counts inside the total'
        )
    found = data.load(config.data, config.data_dir or None, config.download)
    if config.train_examples:
        found = found._replace(train=data.take(found.train, config.train_examples))
    examples = len(found.train.y)
    if not 1 <= config.batch_size <= examples:
        raise ValueError(f'config.batch_size={config.batch_size} is not in 1..{examples}')
    fwd, bwd = (parse(config[k], {'examples': examples}) for k in ('fwd', 'bwd'))
    if bwd.per_example:
        raise ValueError(f'config.bwd={config.bwd!r}: aqsgd is for activations; use ef or ef21')
    if fwd.per_example:
        check_ids(fwd, config.fwd, examples)
    stages = MODELS[config.model](found.classes, config.width)
    epoch_steps = examples // config.batch_size
    model, warmed = pipeline(stages, fwd, bwd), pipeline(stages, warm(fwd), warm(bwd))
    return Setting(config, found, model, warmed, optimiser(config, epoch_steps), epoch_steps)


def check_ids(fwd: Channel, text: str, examples: int) -> None:
    """Raises ValueError if the table of ``fwd`` has fewer rows than there are examples."""
    tx, _ = jax.eval_shape(lambda: fwd.init(jax.ShapeDtypeStruct((1, 1), jnp.float32)))
    if len(tx) < examples:
        raise ValueError(
            f'config.fwd={text!r} has buffers for {len(tx)} examples and the training set has '
            f'{examples}; write examples=examples'
        )


def optimiser(
    config: ml_collections.ConfigDict, epoch_steps: int
) -> optax.GradientTransformation:
    """SGD with momentum, weight decay on all parameters, a cosine that moves once an epoch."""

    def rate(step: Array) -> Array:
        epoch = step // epoch_steps
        return config.lr * 0.5 * (1 + jnp.cos(jnp.pi * epoch / config.cosine_epochs))

    decay = optax.add_decayed_weights(config.weight_decay)
    return optax.chain(decay, optax.sgd(rate, config.momentum))


def create(s: Setting) -> TrainState:
    """The state before the first step."""
    key = jax.random.key(s.config.seed)
    x = jnp.zeros((s.config.batch_size, *s.data.train.x.shape[1:]), jnp.float32)
    variables, links = s.model.init(jax.random.fold_in(key, 0), x, train=True)
    opt_state = jax.jit(s.optimiser.init)(split(variables)[0])
    return TrainState(jnp.zeros((), jnp.int32), variables, opt_state, links, key)


def split(variables: Any) -> tuple[Any, Any]:
    """Parameters, and the other collections, of every stage."""
    params = tuple(v['params'] for v in variables)
    return params, tuple({k: v[k] for k in v if k != 'params'} for v in variables)


def join(params: Any, rest: Any) -> Any:
    """Inverse of `split`."""
    return tuple({'params': p, **r} for p, r in zip(params, rest, strict=True))


def prepare(s: Setting, x: Array, key: Array | None = None) -> Float[Array, 'B H W C']:
    """Bytes to normalised floats; with a key also augmented (crop of a frame of 4, mirror)."""
    if key is not None and s.config.augment == 'crop_flip':
        x = crop_flip(x, key)
    mean, std = (jnp.asarray(v, jnp.float32) for v in (s.data.mean, s.data.std))
    return (x.astype(jnp.float32) / 255 - mean) / std


def crop_flip(x: Array, key: Array, frame: int = 4) -> Array:
    """Each image shifted by up to ``frame`` pixels over black, and mirrored with probability 1/2."""
    key_crop, key_flip = jax.random.split(key)
    padded = jnp.pad(x, ((0, 0), (frame, frame), (frame, frame), (0, 0)))
    corners = jax.random.randint(key_crop, (len(x), 2), 0, 2 * frame + 1)
    rows = corners[:, :1] + jnp.arange(x.shape[1])
    columns = corners[:, 1:] + jnp.arange(x.shape[2])
    mirror = jax.random.bernoulli(key_flip, 0.5, (len(x), 1))
    columns = jnp.where(mirror, columns[:, ::-1], columns)
    image = jnp.arange(len(x))[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]]


def train_step(
    s: Setting, model: Pipeline, state: TrainState, batch: dict[str, Array]
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step; returns the next state, mean loss and accuracy of the batch."""
    key = jax.random.fold_in(state.key, state.step + 1)
    x = prepare(s, batch['x'], jax.random.fold_in(key, 0))
    params, rest = split(state.variables)
    ctx = Ctx(jax.random.fold_in(key, 1), batch['id'])

    def loss(params: Any, links: Links) -> tuple[Array, tuple[Links, Any]]:
        logits, variables, links = model.apply(join(params, rest), links, x, ctx, train=True)
        nll, right = score(logits, batch['y'])
        return jnp.mean(nll), (links, (jnp.mean(right), split(variables)[1]))

    (value, (accuracy, rest)), grads, links = value_and_grad(loss)(params, state.links)
    updates, opt_state = s.optimiser.update(grads, state.opt_state, params)
    variables = join(optax.apply_updates(params, updates), rest)
    state = TrainState(state.step + 1, variables, opt_state, links, state.key)
    return state, {'loss': value, 'accuracy': accuracy}


def score(logits: Array, y: Int[Array, ' B']) -> tuple[Array, Array]:
    """Cross-entropy in nats, and whether the largest logit is right, an example."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return nll, (jnp.argmax(logits, -1) == y).astype(jnp.float32)


Epoch = Callable[[TrainState, np.ndarray], Iterator[tuple[TrainState, dict[str, Array], int]]]


def epoch_by_step(s: Setting, model: Pipeline) -> Epoch:
    """An epoch as a loop over a compiled step: the form for CPU."""
    step = jax.jit(lambda state, batch: train_step(s, model, state, batch), donate_argnums=0)

    def run(state: TrainState, order: np.ndarray) -> Iterator:
        for batch in data.batches(s.data.train, s.config.batch_size, order):
            state, metrics = step(state, batch)
            yield state, metrics, 1

    return run


def epoch_by_scan(s: Setting, model: Pipeline) -> Epoch:
    """An epoch inside one compiled scan, the data on the device: the form for accelerators."""
    x, y = jnp.asarray(s.data.train.x), jnp.asarray(s.data.train.y)

    def step(state: TrainState, at: Array) -> tuple[TrainState, dict[str, Array]]:
        return train_step(s, model, state, {'x': x[at], 'y': y[at], 'id': at})

    scan = jax.jit(lambda state, order: jax.lax.scan(step, state, order), donate_argnums=0)

    def run(state: TrainState, order: np.ndarray) -> Iterator:
        steps = len(order) // s.config.batch_size
        rows = order[: steps * s.config.batch_size].reshape(steps, -1)
        state, metrics = scan(state, rows)
        yield state, jax.tree.map(jnp.sum, metrics), steps

    return run


def evaluation_model(s: Setting) -> Pipeline:
    """The model whose crossings are those of the test: see config.eval_feedback.

    A channel with a buffer an example evaluates as ``C(x)``, for test images have none.
    """

    def channel(fwd: Channel) -> Channel:
        plain = fwd.per_example or s.config.eval_feedback == 'direct'
        return direct(fwd.codec) if plain else fwd

    cuts = tuple(Boundary(channel(b.fwd), b.bwd, b.via) for b in s.model.boundaries)
    return Pipeline(s.model.stages, cuts)


def evaluator(s: Setting) -> Callable[[TrainState, bool], dict[str, float]]:
    """A function of (state, compressed) that scores the whole test split.

    Feedback buffers are carried through a private copy and thrown away, or (config.eval_feedback
    ``frozen``) read and never written; the training state is not touched.
    """
    model = evaluation_model(s)

    @jax.jit
    def step(variables: Any, links: Links | None, batch: dict[str, Array], key: Array) -> Any:
        x = prepare(s, batch['x'])
        logits, _, after = model.apply(variables, links, x, Ctx(key, batch['id']), train=False)
        nll, right = score(logits, batch['y'])
        sums = jnp.stack([jnp.sum(v * batch['mask']) for v in (nll, right)])
        return sums, links if s.config.eval_feedback == 'frozen' else after

    def run(state: TrainState, compressed: bool) -> dict[str, float]:
        links = test_links(model, state.links) if compressed else None
        total = np.zeros(2)
        for i, batch in enumerate(data.batches(s.data.test, s.config.batch_size, pad=True)):
            key = jax.random.fold_in(state.key, i)
            sums, links = step(state.variables, links, batch, key)
            total += np.asarray(sums)
        loss, accuracy = total / len(s.data.test.y)
        return {'loss': float(loss), 'accuracy': float(accuracy)}

    return run


def test_links(model: Pipeline, links: Links) -> Links:
    """The training states of those channels that keep them in the evaluation, else none."""
    nothing = ((), ())
    direct_init = lambda b: not jax.tree.leaves(
        jax.eval_shape(lambda: b.fwd.init(jax.ShapeDtypeStruct((1, 1), jnp.float32)))
    )
    fwd = tuple(
        nothing if direct_init(b) else f for b, f in zip(model.boundaries, links.fwd, strict=True)
    )
    return Links(fwd, links.bwd)


def message_bytes(s: Setting, state: TrainState) -> list[dict[str, int]]:
    """Bytes a step at each boundary: uncompressed, and each way as sent after the warm-up."""
    shape = (s.config.batch_size, *s.data.train.x.shape[1:])
    likes = s.model.likes(state.variables, jax.ShapeDtypeStruct(shape, jnp.float32), train=True)
    rows = []
    for i, (b, x) in enumerate(zip(s.model.boundaries, likes, strict=True), 1):
        forward, backward = (n // 8 for n in b.bits(x))
        row = {'boundary': i, 'uncompressed': nbytes(x), 'forward': forward, 'backward': backward}
        rows.append(row)
    return rows


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT append to, so that the loop can save before it ends."""
    seen: list[int] = []
    old = {n: signal.signal(n, lambda n, _: seen.append(n)) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield seen
    finally:
        for n, handler in old.items():
            signal.signal(n, handler)


def run(config: ml_collections.ConfigDict, workdir: str | Path) -> dict[str, Any] | None:
    """Trains, evaluates every epoch, and leaves config, metrics, checkpoints, summary and curves.

    Goes on from the workdir's last checkpoint if there is one.

    Args:
      config: as in configs/.
      workdir: the run's folder.

    Returns:
      The summary, or None if a signal ended the run early (its state is saved).

    Raises:
      ValueError: for a configuration that makes no sense.
      WorkdirError: if the workdir cannot be used.
      Diverged: if the loss is not finite.
    """
    workdir = Path(workdir)
    s = setting(config)
    claim(workdir, config.to_dict())
    checkpoints = Checkpoints(workdir)
    state = create(s)
    place = {'loss': 0.0, 'accuracy': 0.0, 'steps': 0, 'seconds': 0.0}
    if (found := checkpoints.restore(state)) is not None:
        state, place = found
    metrics = Metrics(workdir, int(state.step), config.tensorboard)
    display = Display(config.epochs * s.epoch_steps, int(state.step), config.batch_size)
    if found is not None:
        display.say(f'going on from step {int(state.step)} of {workdir}')
    try:
        with stop_signals() as stopped:
            state, place = train(s, state, place, checkpoints, metrics, display, stopped)
    finally:
        display.close()
        metrics.close()
        checkpoints.close()
    if stopped:
        print(f'stopped by signal {stopped[0]} at step {int(state.step)}; saved; the same command '
              'goes on from there', flush=True)  # fmt: skip
        return None
    return finish(s, state, place, metrics.records, workdir)


def train(
    s: Setting,
    state: TrainState,
    place: dict[str, Any],
    checkpoints: Checkpoints,
    metrics: Metrics,
    display: Display,
    stopped: list[int],
) -> tuple[TrainState, dict[str, Any]]:
    """The epochs from ``state`` on; see `run`."""
    form = epoch_by_step if jax.default_backend() == 'cpu' else epoch_by_scan
    epochs: dict[bool, Epoch] = {}
    evaluate = evaluator(s)
    start = time.time() - place['seconds']
    for epoch in range(int(state.step) // s.epoch_steps, s.config.epochs):
        warming = epoch < s.config.warmup_epochs
        if warming not in epochs:
            epochs[warming] = form(s, s.warm_model if warming else s.model)
        order = data.order(s.config.seed, epoch, len(s.data.train.y))
        done = int(state.step) % s.epoch_steps
        left = order[done * s.config.batch_size : s.epoch_steps * s.config.batch_size]
        for state, sums, steps in epochs[warming](state, left):  # noqa: B007
            place = add(s, place, sums, steps, epoch)
            display.update(f'epoch {epoch + 1}/{s.config.epochs}', epoch * s.epoch_steps
                           + place['steps'], place['loss'] / place['steps'],
                           place['accuracy'] / place['steps'])  # fmt: skip
            if stopped:
                break
        place['seconds'] = time.time() - start
        if place['steps'] == s.epoch_steps:
            record(s, state, place, epoch + 1, evaluate, metrics, display)
            place = {**place, 'loss': 0.0, 'accuracy': 0.0, 'steps': 0}
            place['seconds'] = time.time() - start
        last = epoch + 1 == s.config.epochs
        if stopped or last or (epoch + 1) % s.config.checkpoint_every == 0:
            checkpoints.save(int(state.step), state, place)
        if stopped:
            break
    return state, place


def add(
    s: Setting, place: dict[str, Any], sums: dict[str, Array], steps: int, epoch: int
) -> dict[str, Any]:
    """Adds the sums of some steps to the epoch's; raises Diverged if the loss is not finite."""
    loss = float(sums['loss'])
    if not math.isfinite(loss):
        step = epoch * s.epoch_steps + place['steps'] + steps
        raise Diverged(
            f'the loss is {loss} at step {step} (epoch {epoch + 1}); the last checkpoint is from '
            'before it. Lower config.lr, or send more bits backward'
        )
    total = {k: place[k] + float(v) for k, v in sums.items()}
    return {**place, **total, 'steps': place['steps'] + steps}


def record(
    s: Setting,
    state: TrainState,
    place: dict[str, Any],
    epoch: int,
    evaluate: Callable[[TrainState, bool], dict[str, float]],
    metrics: Metrics,
    display: Display,
) -> None:
    """Closes an epoch: its mean training loss, and the test with compression off and on."""
    base = {'step': int(state.step), 'epoch': epoch}
    means = {k: place[k] / place['steps'] for k in ('loss', 'accuracy')}
    metrics.write({'kind': 'train', **base, **means, 'seconds': place['seconds']})
    off, on = evaluate(state, False), evaluate(state, True)
    metrics.write({'kind': 'test', **base, 'compression': 'off', **off})
    metrics.write({'kind': 'test', **base, 'compression': 'on', **on})
    display.say(
        f'epoch {epoch}/{s.config.epochs}  {duration(place["seconds"])}  '
        f'train loss {means["loss"]:.4f}  test accuracy off {off["accuracy"]:.2%}  '
        f'on {on["accuracy"]:.2%}'
    )


def finish(
    s: Setting,
    state: TrainState,
    place: dict[str, Any],
    records: list[dict[str, Any]],
    workdir: Path,
) -> dict[str, Any]:
    """Writes summary.json and curves.png, prints the closing tables."""
    keep = ('epoch', 'loss', 'accuracy')
    test = {}
    for mode in ('off', 'on'):
        rows = [r for r in records if r['kind'] == 'test' and r['compression'] == mode]
        best = max(rows, key=lambda r: r['accuracy'])
        test[mode] = {n: {k: r[k] for k in keep} for n, r in (('best', best), ('last', rows[-1]))}
    summary = {
        **{k: s.config[k] for k in ('name', 'fwd', 'bwd', 'seed')},
        'test': test,
        'bytes': message_bytes(s, state),
        'parameters': sum(p.size for p in jax.tree.leaves(split(state.variables)[0])),
        'steps': int(state.step),
        'seconds': round(place['seconds'], 1),
        **provenance(),
        'config': s.config.to_dict(),
    }
    (workdir / 'summary.json').write_text(json.dumps(summary, indent=1) + '\n')
    picture = curves.draw(workdir)
    show(summary)
    print(f'{summary["seconds"]} s; summary and curves: {workdir / "summary.json"}, {picture}')
    return summary
