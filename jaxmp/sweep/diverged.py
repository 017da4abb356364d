"""The result of a run that diverged: a study that left it out would count the others only.

From the step whose loss was not finite any more, each test counts as that of a model whose
output is zero: the accuracy of one class, the loss of equal probabilities.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import data
from jaxmp.config import Summary
from jaxmp.training.across import Traffic
from jaxmp.training.evaluate import means, sums
from jaxmp.training.experiment import Experiment, microbatch_like
from jaxmp.training.sizes import shapes
from jaxmp.training.summary import finish
from jaxmp.training.workdir.records import read


def diverged(exp: Experiment, step: int, workdir: Path, moved: Traffic) -> Summary:
    """The summary of a run whose loss was not finite at ``step``, which it has as ``diverged``.

    Args:
      exp: the experiment.
      step: number of the step, from 1.
      workdir: the run's folder, with the records of before.
      moved: measured bytes, as of a run that ends.
    """
    points, guess = exp.points, guessing(exp)
    records = [r for r in read(workdir / 'metrics.jsonl') if r['step'] < step]
    seconds = max((r.get('seconds', 0.0) for r in records), default=0.0)
    for tested in filter(points.tests, range(step, 1 + points.end)):
        scores = {'step': tested, 'epoch': points.epochs_at(tested), **guess}
        records.append({'kind': 'train', **scores})
        records += [{'kind': 'test', 'compression': mode, **scores} for mode in ('off', 'on')]
    last = {**moved, 'diverged': step}
    return finish(exp, points.end, {'seconds': seconds}, records, last, workdir)


def guessing(exp: Experiment) -> dict[str, float]:
    """The mean scores of an output of zeros on the test split."""
    x, (variables, _) = microbatch_like(exp), shapes(exp)
    predict = lambda variables, x: exp.model.apply(variables, None, x, train=False)[0]
    output = jnp.zeros_like(jax.eval_shape(predict, variables, x))
    batches = data.batches(exp.data.test, len(output), pad=True)
    return means(exp, np.sum([sums(exp, output, batch) for batch in batches], 0))
