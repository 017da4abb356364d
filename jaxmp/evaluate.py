"""How a model is scored: with its boundaries open, or with the test images compressed too.

Feedback buffers belong to the training. An evaluation works on a private copy that is thrown away
(config.eval_feedback ``carry``), reads the training state and never writes (``frozen``), or does
without (``direct``: plain ``C(x)``). A channel with one buffer a training example always evaluates
as ``C(x)``, for test images have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp import data, micro
from jaxmp.boundary import Boundary, Links
from jaxmp.feedback import direct
from jaxmp.pipeline import Pipeline
from jaxmp.setting import Setting
from jaxmp.train import TrainState
from jaxmp.wire import Ctx

Evaluate = Callable[[TrainState, bool], dict[str, float]]
STREAM = 2**32 - 1  # of a run's key; 0 is the initial parameters', a step has its number's


def evaluation_key(key: Array, batch: int) -> Array:
    """Randomness of a batch of the test split, which no training step shares.

    Args:
      key: of the run; see `jaxmp.train.step_keys` for what its steps draw from.
      batch: its number in the split.
    """
    return jax.random.fold_in(jax.random.fold_in(key, STREAM), batch)


def forgets(s: Setting, cut: Boundary) -> bool:
    """Whether the test goes through ``cut`` as plain ``C(x)``."""
    return cut.fwd.per_example or s.config.eval_feedback == 'direct'


def evaluation_model(s: Setting) -> Pipeline:
    """The model whose crossings are those of the test."""
    cuts = tuple(
        Boundary(direct(b.fwd.codec), b.bwd, b.via) if forgets(s, b) else b
        for b in s.model.boundaries
    )
    return Pipeline(s.model.stages, cuts)


def evaluation_links(s: Setting, links: Links) -> Links:
    """The states that the evaluation starts from: the training's, or none."""
    pairs = zip(s.model.boundaries, links.fwd, strict=True)
    return Links(tuple(((), ()) if forgets(s, b) else f for b, f in pairs), links.bwd)


def evaluator(s: Setting) -> Evaluate:
    """A function of (state, compressed): mean loss and accuracy on the whole test split."""
    model = evaluation_model(s)

    cuts, micros = model.boundaries, s.config.micro_batches
    size = s.config.batch_size // s.replicas  # buffers are per position in a replica's batch

    @jax.jit
    def step(variables: Any, links: Links | None, batch: dict[str, Array], key: Array) -> Any:
        ctx, rows = Ctx(key, batch['id']), []
        for m, x in enumerate(micro.cut(s.task.prepare(batch['x'], None), micros)):
            at = None if links is None else micro.take_links(cuts, links, m)
            own = micro.context(ctx, m, micros)
            logits, _, after = model.apply(variables, at, x, own, train=False)
            if links is not None and s.config.eval_feedback != 'frozen':
                links = micro.put_links(cuts, links, m, after)
            rows.append(logits)
        return sums(s, jnp.concatenate(rows), batch), links

    def run(state: TrainState, compressed: bool) -> dict[str, float]:
        links = evaluation_links(s, state.links) if compressed else None
        total = np.zeros(2)
        for i, batch in enumerate(data.batches(s.data.test, size, pad=True)):
            new, links = step(state.variables, links, batch, evaluation_key(state.key, i))
            total += np.asarray(new)
        return means(s, total)

    return run


def sums(s: Setting, logits: Array, batch: Mapping[str, Any]) -> Array:
    """Sums of loss and of right answers over a batch whose padding is masked."""
    return jnp.stack([jnp.sum(v * batch['mask']) for v in s.task.score(logits, batch['y'])])


def means(s: Setting, total: np.ndarray) -> dict[str, float]:
    """Sums over the test split as means."""
    loss, accuracy = total / len(s.data.test.y)
    return {'loss': float(loss), 'accuracy': float(accuracy)}
