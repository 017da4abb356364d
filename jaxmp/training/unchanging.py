"""`unchanging`: whether what the first trained stage receives of an example is always the same."""

from __future__ import annotations

import jax
from jaxtyping import Array

from jaxmp.boundary.pipeline import Variables, run_stage
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.kept import draws, varies
from jaxmp.training.experiment import Experiment, microbatch_like, variables_like
from jaxmp.training.sizes import likes
from jaxmp.wire import Ctx


def unchanging(exp: Experiment) -> str:
    """Why activations have to be sent each time, or '' where once is enough.

    Asked where stages below ``exp.first`` have nothing that is trained.
    """
    cut, x = exp.first - 1, microbatch_like(exp)
    if exp.replicas > 1:
        return f'{exp.replicas} replicas see other examples in each epoch'
    if exp.phases:
        return 'the channels change in the run'
    variables = variables_like(exp.model, x)[0][: exp.first]
    for s, collections in enumerate(variables):
        if names := sorted(collections.keys() - {'params'}):
            return f'stage {s} changes its {", ".join(names)}'
    examples = exp.data.train.x
    dtype = jax.dtypes.canonicalize_dtype(examples.dtype)
    batch = jax.ShapeDtypeStruct((x.shape[0], *examples.shape[1:]), dtype)

    def run(key: Array, variables: Variables, x: Array) -> Array:
        x = exp.task.prepare(x, jax.random.fold_in(key, 0))
        ctx = Ctx(jax.random.fold_in(key, 1)).reading(x)
        for s, collections in enumerate(variables):
            x, _ = run_stage(
                exp.task.stages[s], collections, x, ctx.fold(2 * s + 1), {'train': True}
            )
        return x

    if draws(run, jax.random.key(0), variables, batch):
        return f'the input or a stage before boundary {cut + 1} is random'
    return varies(exp.model.boundaries[cut], likes(exp)[cut])


def with_kept(exp: Experiment, group: ProcessGroup) -> Experiment:
    """The experiment, which says whether activations of frozen stages are sent once."""
    if not (exp.first and exp.parallel.keeps):
        return exp
    reasons = [reason for reason in group.share(unchanging(exp)) if reason]
    if reasons:
        return exp._replace(sending=f'sends activations of frozen stages each time: {reasons[0]}')
    count = len(exp.data.train.y)
    return exp._replace(
        kept=count,
        sending=f'sends {count} examples once, which stage {exp.first} keeps on disk, because '
        'nothing before it is trained',
    )
