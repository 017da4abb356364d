"""What is learned: data, stages, how an example enters the network and how its output is scored.

`train.py`'s ``config.model`` names a task: an image classifier or a language model. A trainer knows
nothing else of either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxmp import data, models
from jaxmp.wire import Like

AUGMENT = ('none', 'crop_flip')
IMAGE_KEYS = ('width', 'pool', 'augment', 'download')
TEXT_KEYS = (
    'sequence_length', 'tokenizer', 'stages', 'width', 'blocks', 'heads', 'dropout', 'dtype',
    'remat', 'init_from',
)  # fmt: skip
Config = Any  # an ml_collections.ConfigDict, whose attributes have no static types


class Task(NamedTuple):
    """A model with its data.

    Attributes:
      data: what is learned from; the position of an example is its id.
      stages: Flax modules with ``__call__(x, train)``.
      like: what enters the first stage, without the batch axis.
      measure: the headline of a table, ``'accuracy'`` or ``'perplexity'``.
      prepare: ``(x, key or None) -> input``; with a key also augmented.
      score: ``(output, y) -> (nats, share of right answers)``, each ``(B,)``.
      start: ``(stage, its variables, key of init) -> variables`` before the first step.
      tied: the first and the last of several stages hold a copy of one parameter, ``wte``.
      export: writes the variables of all stages, and a tokeniser, to a folder in a layout others
        read, or None.
    """

    data: data.Dataset
    stages: tuple[nn.Module, ...]
    like: Like
    measure: str
    prepare: Callable[[Array, Array | None], Array]
    score: Callable[[Array, Array], tuple[Array, Array]]
    start: Callable[[int, Any, Array], Any] = lambda stage, variables, key: variables
    tied: bool = False
    export: Callable[[str, Any], None] | None = None


def images(config: Config) -> Task:
    """An image classifier of ``config.width``."""
    found = data.pool(data.load(config.data, config.data_dir or None, config.download), config.pool)

    def prepare(x: Array, key: Array | None) -> Float[Array, 'B H W C']:
        if key is not None and config.augment == 'crop_flip':
            x = crop_flip(x, key, frame=4 // config.pool)
        mean, std = (jnp.asarray(v, jnp.float32) for v in (found.mean, found.std))
        return (x.astype(jnp.float32) / 255 - mean) / std

    stages = MODELS[config.model](found.classes, config.width)
    like = jax.ShapeDtypeStruct(found.train.x.shape[1:], jnp.float32)
    return Task(found, tuple(stages), like, 'accuracy', prepare, score_classes)


def crop_flip(x: Array, key: Array, frame: int = 4) -> Array:
    """Each image shifted by up to ``frame`` pixels over black, mirrored with probability 1/2."""
    key_crop, key_flip = jax.random.split(key)
    padded = jnp.pad(x, ((0, 0), (frame, frame), (frame, frame), (0, 0)))
    corners = jax.random.randint(key_crop, (len(x), 2), 0, 2 * frame + 1)
    rows = corners[:, :1] + jnp.arange(x.shape[1])
    columns = corners[:, 1:] + jnp.arange(x.shape[2])
    mirror = jax.random.bernoulli(key_flip, 0.5, (len(x), 1))
    columns = jnp.where(mirror, columns[:, ::-1], columns)
    image = jnp.arange(len(x))[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]]


def score_classes(logits: Array, y: Int[Array, ' B']) -> tuple[Array, Array]:
    """Cross-entropy in nats, and whether the largest logit is right, an example."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return nll, (jnp.argmax(logits, -1) == y).astype(jnp.float32)


def language(config: Config) -> Task:
    """A GPT-2 on text, from random parameters or from a folder of weights."""
    from jaxmp.data import text
    from jaxmp.models import gpt2, tied, weights

    found, tokenizer = text.load(
        config.data, config.sequence_length, config.tokenizer, config.data_dir or None,
        config.get('download', False),
    )  # fmt: skip
    dropout = (config.dropout,) * 3
    if config.init_from:
        sizes = weights.read_config(config.init_from, dropout=dropout)
        weights.check_vocabulary(sizes, found.classes)
    else:
        words = {k: config[k] for k in ('width', 'blocks', 'heads')}
        sizes = gpt2.Config(found.classes, config.sequence_length, dropout=dropout, **words)
    dtype = None if config.dtype == 'float32' else jnp.dtype(config.dtype)
    stages = gpt2.gpt2(dataclasses.replace(sizes, dtype=dtype, remat=config.remat), config.stages)

    def start(stage: int, variables: Any, key: Array) -> Any:
        if config.init_from:
            return weights.read(config.init_from, stages, stage)[0]
        if stage not in (0, len(stages) - 1):
            return variables
        table = tied.table(stages[0], jax.random.fold_in(key, 0))
        return {**variables, 'params': {**variables['params'], 'wte': table}}

    def export(folder: str, variables: Any) -> None:
        weights.write(folder, stages, variables)
        tokenizer.save(Path(folder))

    like = jax.ShapeDtypeStruct((config.sequence_length,), jnp.int32)
    return Task(
        found, stages, like, 'perplexity', lambda x, key: jnp.asarray(x, jnp.int32),
        score_tokens, start, len(stages) > 1, export,
    )  # fmt: skip


def score_tokens(logits: Array, tokens: Int[Array, 'B T']) -> tuple[Array, Array]:
    """Mean nats a predicted token, and the share of tokens that were the likeliest, a sequence."""
    from jaxmp.models.gpt2 import next_token_loss

    right = jnp.argmax(logits[:, :-1], -1) == tokens[:, 1:]
    return next_token_loss(logits, tokens), jnp.mean(right.astype(jnp.float32), -1)


MODELS = {'resnet18': models.resnet18, 'lenet': models.lenet}  # (classes, width) -> stages
TASKS = {'gpt2': language}


def task_of(config: Config) -> Task:
    """The task that ``config.model`` names.

    Raises:
      ValueError: for a value that is not allowed; the message names the key.
    """
    return TASKS.get(config.model, images)(config)


def stage_count(config: Config) -> int:
    """How many stages the model has, without its data."""
    return config.stages if config.model in TASKS else len(MODELS[config.model](1, config.width))


def once(task: Task, stage: int, grads: Any) -> Any:
    """``grads`` of a stage without the copy of what another stage counts already."""
    if not (task.tied and stage == len(task.stages) - 1):
        return grads
    return {k: g for k, g in grads.items() if k != 'wte'}


def alone(task: Task, trees: Any) -> tuple[Any, ...]:
    """Parameters or gradients of all stages without the copy; see `copied`."""
    return tuple(once(task, i, t) for i, t in enumerate(trees))


def copied(task: Task, trees: Any) -> tuple[Any, ...]:
    """Inverse of `alone`."""
    if not task.tied:
        return tuple(trees)
    return (*trees[:-1], {**trees[-1], 'wte': trees[0]['wte']})
