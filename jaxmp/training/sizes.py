"""How large an experiment is: messages, parameters, feedback states against the memory there is."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxmp import exchange
from jaxmp.boundary import Boundary, FeedbackState
from jaxmp.boundary.pipeline import Pipeline, Variables
from jaxmp.models.blocks import weights_in
from jaxmp.runtimes.placement import memory
from jaxmp.runtimes.stage import StageProgram, programs
from jaxmp.runtimes.state import MicroBatch, Residuals
from jaxmp.training.across import Traffic
from jaxmp.training.evaluate import model_of
from jaxmp.training.experiment import Experiment, microbatch_like, variables_like
from jaxmp.training.groups import copied, split
from jaxmp.wire import Ctx, Like, nbytes


def check_memory(exp: Experiment) -> None:
    """Raises ValueError if the feedback states are larger than this machine's memory."""
    rows, total, have = feedback_rows(exp), exp.replicas * feedback_bytes(exp), memory()
    if total <= have:
        return
    _, states = shapes(exp)
    terms = []
    for i, (state, size) in enumerate(zip(states.fwd, rows, strict=True), 1):
        largest = max(jax.tree.leaves(state), key=lambda a: a.size)
        product = ' x '.join(f'{n:,}' for n in largest.shape)
        terms.append(
            f'boundary {i}: {product} x {largest.dtype.itemsize} bytes, both ends and ways '
            f'{size / 2**30:,.1f} GiB'
        )
    raise ValueError(
        f'config.fwd={exp.config.fwd!r} and config.bwd={exp.config.bwd!r} keep feedback states of '
        f'{total / 2**30:,.1f} GiB ({"; ".join(terms)}'
        + (f'; {exp.replicas} replicas' if exp.replicas > 1 else '')
        + f'), and there is a memory of {have / 2**30:,.1f} GiB; take fewer '
        'config.data.train_examples (and examples=examples), a smaller config.model.width, '
        'table=4 in aqsgd, or ef21, which keeps no examples'
    )


def feedback_rows(exp: Experiment) -> list[int]:
    """Bytes of the feedback states of each boundary, both ends and ways, of one replica."""
    return [sum(ends) for ends in feedback_ends(exp)]


def feedback_bytes(exp: Experiment) -> int:
    """Bytes of all feedback states of one replica as its runtime keeps them."""
    return exp.parallel.feedback_bytes(feedback_ends(exp))


def feedback_ends(exp: Experiment) -> list[tuple[int, ...]]:
    """Bytes at each boundary: of the sender and the receiver forward, and of both backward.

    In one program both ends share a state where it is the same at both.
    """
    _, states = shapes(exp)
    count, apart = exp.config.parallel.num_microbatches, exp.parallel.apart
    rows = []
    for i, cut in enumerate(exp.model.boundaries):
        row: list[int] = []
        for channel, (tx, rx) in ((cut.fwd, states.fwd[i]), (cut.bwd, states.bwd[i])):
            slots = 1 if channel.is_table else count
            copy = tx if channel.shared_state and apart else rx
            row += [slots * nbytes(tx), slots * nbytes(copy)]
        rows.append(tuple(row))
    return rows


def residual_rows(exp: Experiment) -> list[tuple[int, int]]:
    """For each stage the bytes of a micro-batch's residuals, and how many it keeps at once.

    Where stages are apart, they keep them from a forward to its backward.
    """
    stages = programs(model_of(exp, exp.model.boundaries))
    x, rows = exp.data.train, microbatch_like(exp).shape[0]
    y = jax.eval_shape(lambda: jnp.zeros((rows, *x.y.shape[1:]), x.y.dtype))
    ids = jax.eval_shape(lambda: jnp.zeros(rows, jnp.int32))
    sizes = []
    for p in stages:
        ctx = Ctx(ids=ids).reading(stages[0].x)
        batch = MicroBatch(None if p.left else p.x, None if p.right else y, ctx)
        sizes.append(nbytes(jax.eval_shape(functools.partial(_residuals, p), batch)))
    return exp.parallel.residuals(sizes, exp.delays)


def _residuals(p: StageProgram, batch: MicroBatch) -> Residuals:
    """What the forward of a stage leaves."""
    key = jax.random.key(0)
    message = p.left and jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype), p.left.messages(p.x)[0]
    )
    keyed = batch._replace(ctx=batch.ctx._replace(key=key, microbatch=jnp.int32(0)))
    return p.forward(p.init(key), keyed, message)[2]


def check_residuals(exp: Experiment) -> None:
    """Raises ValueError if residuals of the stages of a process and all else cannot fit."""
    rows, have = residual_rows(exp), memory()
    total = exp.replicas * (sum(size * most for size, most in rows) + feedback_bytes(exp))
    if total <= have:
        return
    terms = '; '.join(f'stage {s}: {most} x {size:,} bytes' for s, (size, most) in enumerate(rows))
    raise ValueError(
        f'{exp.replicas} x {len(rows)} stages keep {total / 2**30:,.1f} GiB between forwards and '
        f'backwards, feedback states included ({terms}), and there is a memory of '
        f'{have / 2**30:,.1f} GiB; take --config.parallel.remat=True, which runs a stage again '
        'instead, a larger config.parallel.num_microbatches, or a schedule that keeps fewer'
    )


def message_bytes(exp: Experiment, cuts: Sequence[Boundary] | None = None) -> list[dict[str, int]]:
    """Bytes per step at each boundary: uncompressed, and each way as sent.

    Args:
      exp: the experiment.
      cuts: boundaries of a phase; without them those of the configuration's channels.
    """
    cuts = exp.model.boundaries if cuts is None else cuts
    count, rows = exp.config.parallel.num_microbatches, []
    for i, (b, x) in enumerate(zip(cuts, likes(exp), strict=True), 1):
        forward, backward = (count * n // 8 for n in b.bits(x))
        backward *= i > exp.first  # below what is trained no gradient is sent
        full = count * nbytes(x)
        row = {'boundary': i, 'uncompressed': full, 'forward': forward, 'backward': backward}
        rows.append(row)
    return rows


def phase_bytes(exp: Experiment) -> list[Traffic]:
    """The phases of a run: codecs, first epoch from 0, the epoch after the last, bytes per step.

    The bytes are those of all boundaries, both ways.
    """
    return [
        {
            'codec': p.text, 'start': p.epochs.start, 'stop': p.epochs.stop,
            'bytes': sum(r['forward'] + r['backward'] for r in message_bytes(exp, p.boundaries)),
        }
        for p in exp.phases
    ]  # fmt: skip


def table_bytes(exp: Experiment) -> Traffic:
    """Bytes per step for the parameter of which two stages have a copy.

    In the form of `message_bytes`; empty where there is none.
    """
    if not (group := copied(exp.groups)):
        return {}
    assert group.between
    params = {s: v['params'] for s, v in enumerate(shapes(exp)[0])}
    table = split(exp.groups, params)[group.homes[0], group]
    sent = exchange.bytes_of(group.between, table, 2)
    ways = dict.fromkeys(('forward', 'backward'), sent['sent'])
    text = exp.config.tied_exchange
    return {'tied': {'text': text, 'uncompressed': sent['uncompressed'], **ways}}


def shapes(exp: Experiment) -> tuple[Variables, FeedbackState]:
    """Variables of all stages and states of all boundaries, as shapes."""
    return variables_like(exp.model, microbatch_like(exp))


def likes(exp: Experiment) -> tuple[Like, ...]:
    """Shape and dtype of what crosses each boundary."""
    return _likes(exp.model, microbatch_like(exp))


@functools.lru_cache(maxsize=4)
def _likes(model: Pipeline, x: Like) -> tuple[Like, ...]:
    return tuple(model.likes(variables_like(model, x)[0], x, train=True))


def parameters(exp: Experiment) -> int:
    """How many there are."""
    return weights_in([v['params'] for v in shapes(exp)[0]])
