"""The model of an experiment, and its evaluation: boundaries, feedback, keys, sums and means."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxmp import data
from jaxmp.boundary import Boundary, boundary
from jaxmp.codecs import raw
from jaxmp.feedback import direct, per_microbatch
from jaxmp.runtimes.state import Feedback
from jaxmp.runtimes.types import Batch, Model, ModelState, each
from jaxmp.training.experiment import Experiment, microbatch_like
from jaxmp.training.groups import copied
from jaxmp.training.late import mixed

FeedbackByStage = dict[int, PyTree]  # a `Feedback`, or of several replicas a `ByReplica` of them
Predict = Callable[[ModelState, Batch, Array], tuple[Array | None, PyTree]]
STREAM = 2**32 - 1  # of a run's key; 0 is the initial parameters', a step has its number's


def forgets(cut: Boundary) -> bool:
    """Whether the test crosses ``cut`` without feedback, as plain ``C(x)``."""
    return cut.fwd.state_of == 'example'


def cuts_to_score(exp: Experiment, compressed: bool) -> tuple[Boundary, ...]:
    """The boundaries of a test: open, or compressed as in training.

    A channel with a buffer per training example is always ``C(x)``, for test examples have none.
    """
    if not compressed:
        return (boundary(direct(raw), direct(raw)),) * len(exp.model.boundaries)
    return tuple(
        Boundary(direct(b.fwd.codec), b.bwd) if forgets(b) else b for b in exp.model.boundaries
    )


def feedback_to_score(
    exp: Experiment, compressed: bool, trained: FeedbackByStage
) -> FeedbackByStage:
    """The feedback states that a test starts from, in the form of ``trained``.

    Args:
      exp: the experiment.
      compressed: whether the boundaries compress.
      trained: `Feedback` of each stage, or that of each of its replicas.
    """
    carries = [False, *(compressed and not forgets(b) for b in exp.model.boundaries), False]

    def one(s: int, f: Feedback) -> Feedback:
        forward = f.left_rx if carries[s] else (), f.right_tx if carries[s + 1] else ()
        backward = (f.left_tx, f.right_rx) if compressed else ((), ())
        return Feedback(forward[0], backward[0], forward[1], backward[1])

    return {s: each(functools.partial(one, s), f) for s, f in trained.items()}


def totals(exp: Experiment, start: ModelState, key: Array, predict: Predict) -> np.ndarray:
    """Sums of the scores over the test split, in the task's order.

    Feedback buffers belong to the training. A test works on a copy that is dropped.

    Args:
      exp: the experiment.
      start: the state, with the feedback of `feedback_to_score`.
      key: of the run.
      predict: ``(state, batch, key) -> (sums, feedback after)``; sums are None in a process that
        has no output.
    """
    state, total = start, np.zeros(len(exp.task.scores))
    size = exp.config.batch_size // exp.replicas  # buffers are per position in a replica's batch
    for i, batch in enumerate(data.batches(exp.data.test, size, pad=True)):
        new, after = predict(state, batch, evaluation_key(key, i))
        state = state._replace(feedback=after)
        total += 0 if new is None else np.asarray(new)
    jax.block_until_ready(state.feedback)
    return total


def model_of(exp: Experiment, cuts: tuple[Boundary, ...]) -> Model:
    """The model of an experiment, with some boundaries between its stages."""
    n = exp.config.parallel.num_microbatches
    cuts = tuple(boundary(per_microbatch(b.fwd, n), per_microbatch(b.bwd, n)) for b in cuts)

    def loss(output: Array, y: Array) -> tuple[Array, dict[str, Array]]:
        scores = {k: jnp.mean(v) for k, v in scored(exp, output, y).items()}
        return scores['loss'], scores

    remat, x, task = exp.config.parallel.remat, microbatch_like(exp), exp.task
    normed = bool(exp.config.optimizer.clip_norm) and not copied(exp.groups)  # copies are summed
    normed = normed and not mixed(exp.delays)
    model = Model(task.stages, cuts, task.prepare, loss, x, n, remat, task.trained)
    return model._replace(first=exp.first, kept=exp.kept, normed=normed, delays=exp.delays)


def evaluation_key(key: Array, batch: int) -> Array:
    """The key of a batch of the test split, which no training step shares.

    Args:
      key: of the run.
      batch: its number in the split.
    """
    return jax.random.fold_in(jax.random.fold_in(key, STREAM), batch)


def sums(exp: Experiment, output: Array, batch: Batch) -> Array:
    """Sums of the scores, in the task's order, over a batch whose padding is masked."""
    rows = scored(exp, output, batch['y']).values()
    return jnp.stack([jnp.sum(v * batch['mask']) for v in rows])


def scored(exp: Experiment, output: Array, y: Array) -> dict[str, Array]:
    """The scores per example, in the task's order.

    Raises:
      ValueError: if the task's function gives others than it names, or of another shape.
    """
    values, names = exp.task.score(output, y), exp.task.scores
    shapes = {k: jnp.shape(v) for k, v in values.items()}
    if set(values) != set(names) or set(shapes.values()) != {(len(y),)}:
        raise ValueError(
            f'the task gives the scores {shapes} of {len(y)} examples; it must give '
            f'{", ".join(names)}, a value per example each'
        )
    return {k: values[k] for k in names}


def means(exp: Experiment, total: np.ndarray) -> dict[str, float]:
    """Sums over the test split as means, by name."""
    count = len(exp.data.test.y)
    return {k: float(v) / count for k, v in zip(exp.task.scores, total, strict=True)}
