"""`Task`: data, stages, preparation of inputs and scores of outputs.

The trainer uses nothing else of a model. `task_of` in `named` finds the task that a
configuration names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxmp import data
from jaxmp.boundary.pipeline import Stage, Variables
from jaxmp.config import Config
from jaxmp.exchange.collectives import Tree
from jaxmp.metrics import ACCURACY, PERPLEXITY, Metric
from jaxmp.models.entrance import Entrance
from jaxmp.models.tied import TiedParameter
from jaxmp.runtimes.trained import Select, everything
from jaxmp.wire import Like, like

Collections = dict[str, Tree]  # the variables of a stage as Flax has them: 'params' and others


def _unchanged(stage: int, variables: Collections, key: Array) -> Collections:
    return variables


class Task(NamedTuple):
    """A model with its data.

    Attributes:
      data: the data set; the position of an example is its id.
      stages: Linen modules with ``__call__(x, train)``, or `jaxmp.nnx.stage` of nnx modules; each
        takes the output of the previous one.
      prepare: ``(x, key or None) -> input``; with a key it may augment.
      score: ``(output, y) -> {name: (B,)}``, per example; the mean of ``'loss'`` is minimized.
      metric: the metric that tables and progress show.
      scores: the names of the scores that ``score`` returns.
      start: ``(stage, its variables, key of init) -> variables`` before the first step.
      read: ``(stage, key of init) -> variables``, in place of random ones, or None.
      tied: a parameter that the first and the last of several stages share, or None.
      export: a function that writes the variables of all stages, and a tokenizer, to a folder in a
        common layout, or None.
      trained: ``(stage, path) -> bool``: whether that parameter is trained; others stay as
        ``start`` leaves them.
    """

    data: data.Dataset
    stages: tuple[Stage, ...]
    prepare: Callable[[Array, Array | None], Array]
    score: Callable[[Array, Array], dict[str, Array]]
    metric: Metric
    scores: tuple[str, ...] = ('loss', 'accuracy')
    start: Callable[[int, Collections, Array], Collections] = _unchanged
    tied: TiedParameter | None = None
    export: Callable[[str, Variables], None] | None = None
    trained: Select = everything
    read: Callable[[int, Array], Collections] | None = None

    @property
    def like(self) -> Like:
        """Shape and dtype of an input of the first stage, for one example."""
        x = self.data.train.x
        batch = jax.ShapeDtypeStruct((1, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))
        batch = like(jax.eval_shape(lambda x: self.prepare(x, None), batch))
        return jax.ShapeDtypeStruct(batch.shape[1:], batch.dtype)

    @property
    def copied(self) -> TiedParameter | None:
        """The tied parameter, if it is trained.

        Raises:
          ValueError: if it is trained in the first or in the last stage alone.
        """
        if self.tied is None:
            return None
        path, last = self.tied.path, len(self.stages) - 1
        if self.trained(0, path) != self.trained(last, path):
            raise ValueError(
                f'{".".join(path)} is trained in one of the stages that share it, 0 and {last}; '
                'train it in both or in neither'
            )
        return self.tied if self.trained(0, path) else None


def is_traced(variables: Collections) -> bool:
    """Whether somebody wants shapes and dtypes alone."""
    return any(isinstance(a, Tracer) for a in jax.tree.leaves(variables))


def entered(task: Task) -> Task:
    """``task`` with stages that scale and shift what arrives; see `jaxmp.models.entrance`."""
    first, *later = task.stages
    return task._replace(stages=(first, *map(Entrance, later)), export=None)


def measured(task: Task, metric: Metric) -> Task:
    """``task`` with ``metric`` as its metric; if it has its own function, that score is added."""
    if metric.of is None:
        return task._replace(metric=metric)
    of, score = metric.of, task.score
    with_metric = lambda output, y: {**score(output, y), metric.score: of(output, y)}
    return task._replace(metric=metric, score=with_metric, scores=(*task.scores, metric.score))


def reader(dataset: data.Dataset, stages: Sequence[Stage]) -> Task:
    """The task of stages that predict the next token of a text: its loss and its perplexity."""
    prepare = lambda x, key: jnp.asarray(x, jnp.int32)
    masked = any(y is not x and data.extremes(y)[0] < 0 for x, y in (dataset.train, dataset.test))
    # Two functions, since a sum divided by a count rounds otherwise than a mean.
    scores = score_targets if masked else score_tokens

    def score(logits: Array, y: Array) -> dict[str, Array]:
        if logits.ndim != 3 or logits.shape[-1] < dataset.classes:
            raise ValueError(
                f'the last stage gives {logits.dtype.name}{list(logits.shape)}, and a text of '
                f'{dataset.classes} tokens needs (B, T, {dataset.classes}) logits or more; give it '
                'dataset.classes, or config.data.tokenizer the tokenizer of the model'
            )
        return scores(logits, y)

    return Task(dataset, tuple(stages), prepare, score, PERPLEXITY)


def classifier(config: Config, dataset: data.Dataset, stages: Sequence[Stage]) -> Task:
    """The task of stages whose output is one logit per class."""

    def prepare(x: Array, key: Array | None) -> Float[Array, 'B *shape']:
        if key is not None and config.data.augment == 'crop_flip':
            x = crop_flip(x, key, frame=4 // config.data.pool)
        if not dataset.mean:
            return x
        mean, std = (jnp.asarray(v, jnp.float32) for v in (dataset.mean, dataset.std))
        return (x.astype(jnp.float32) / 255 - mean) / std

    return Task(dataset, tuple(stages), prepare, score_classes, ACCURACY)


def crop_flip(x: Array, key: Array, frame: int = 4) -> Array:
    """Images shifted at random by up to ``frame`` pixels over black, half of them mirrored."""
    key_crop, key_flip = jax.random.split(key)
    padded = jnp.pad(x, ((0, 0), (frame, frame), (frame, frame), (0, 0)))
    corners = jax.random.randint(key_crop, (len(x), 2), 0, 2 * frame + 1)
    rows = corners[:, :1] + jnp.arange(x.shape[1])
    columns = corners[:, 1:] + jnp.arange(x.shape[2])
    mirror = jax.random.bernoulli(key_flip, 0.5, (len(x), 1))
    columns = jnp.where(mirror, columns[:, ::-1], columns)
    image = jnp.arange(len(x))[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]]


def score_classes(logits: Array, y: Int[Array, ' B']) -> dict[str, Array]:
    """Cross-entropy in nats, and whether the largest logit is right, per example."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return {'loss': nll, 'accuracy': (jnp.argmax(logits, -1) == y).astype(jnp.float32)}


def cuts_of(text: str) -> tuple[int, ...]:
    """The numbers of ``config.model.cuts``.

    Raises:
      ValueError: if it has anything else.

    >>> cuts_of('8 16 23')
    (8, 16, 23)
    """
    words = text.replace(',', ' ').split()
    if not all(word.isdecimal() for word in words):
        raise ValueError(
            f"config.model.cuts={text!r} is not a list of numbers of blocks such as '8 16 23'"
        )
    return tuple(map(int, words))


def score_tokens(logits: Array, tokens: Int[Array, 'B T']) -> dict[str, Array]:
    """Mean nats per predicted token, and the share of correct predictions, per sequence."""
    from jaxmp.models.layers import next_token_nats

    right = jnp.argmax(logits[:, :-1], -1) == tokens[:, 1:]
    nll = next_token_nats(logits, tokens).mean(-1)
    return {'loss': nll, 'accuracy': jnp.mean(right.astype(jnp.float32), -1)}


def score_targets(logits: Array, targets: Int[Array, 'B T']) -> dict[str, Array]:
    """As `score_tokens`, over the tokens that are not -1 in ``targets``."""
    from jaxmp.models.layers import mean_of_targets, next_token_nats

    right = (jnp.argmax(logits[:, :-1], -1) == targets[:, 1:]).astype(jnp.float32)
    nats = next_token_nats(logits, targets)
    return {'loss': mean_of_targets(nats, targets), 'accuracy': mean_of_targets(right, targets)}
