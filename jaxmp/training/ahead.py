"""`compile_ahead`: programs first, then parameters: memory holds what makes either, not both."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Array

from jaxmp import data
from jaxmp.exchange.collectives import Params
from jaxmp.runtimes.replicated import Replicated
from jaxmp.training.evaluate import cuts_to_score, feedback_to_score
from jaxmp.training.footprint import parameters
from jaxmp.training.step import TrainState, create
from jaxmp.training.trainer import Trainer


def compile_ahead(trainer: Trainer) -> None:
    """Compiles step and tests before parameters are read, where one program has all stages."""
    exp, runtime = trainer.exp, cast('Any', trainer.training)
    one = isinstance(trainer.training, Replicated) and trainer.group.count == 1
    if not one or runtime.mesh or exp.task.read is None or trainer.scans:
        return
    key = jax.random.key(exp.config.seed)

    def start(key: Array, params: Params) -> TrainState:
        model = runtime.init(key, draw=False)._replace(params=params)
        return create(Trainer.rules(trainer, 0), runtime, trainer.across, key, model)

    state, size = jax.eval_shape(start, key, parameters(exp)), exp.config.batch_size
    if trainer.during(exp.boundaries(0)) is runtime:
        step: Any = trainer.bound(runtime, trainer.rules(0))
        step.lower(state, next(trainer.batches(np.arange(size)))).compile()
    batch, feedback = next(data.batches(exp.data.test, size, pad=True)), state.model.feedback
    for compressed in trainer.tests:
        test: Any = trainer.during(cuts_to_score(exp, compressed), train=False)
        states = feedback_to_score(exp, compressed, runtime.unpack(feedback))
        model = state.model._replace(feedback=jax.eval_shape(test.pack, states))
        test.predict_ahead(trainer.sums, model, batch, key)
