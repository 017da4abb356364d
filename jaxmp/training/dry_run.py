"""`dry_run`: what a run would be: stages, messages, memory; and whether its first update runs."""

from __future__ import annotations

import time

import jax
import numpy as np
from rich.table import Table

from jaxmp import data, terminal
from jaxmp.config import Config
from jaxmp.models.blocks import weights_in
from jaxmp.net.group import ProcessGroup
from jaxmp.training.experiment import Experiment, microbatch_like, warnings_on
from jaxmp.training.footprint import parameters
from jaxmp.training.loop import prepare
from jaxmp.training.sizes import (
    check_residuals,
    feedback_rows,
    likes,
    message_bytes,
    residual_rows,
)
from jaxmp.training.summary import BYTES, byte_cells
from jaxmp.training.tasks.task import Task
from jaxmp.training.trainer import Trainer
from jaxmp.wire import nbytes


def dry_run(config: Config, group: ProcessGroup, task: Task | None = None) -> None:
    """Prints the tables, then runs one step and forgets it; nothing is written.

    Raises:
      ValueError: for a configuration that makes no sense, or that needs more memory than there is.
    """
    say = lambda *parts: None if group.index else terminal.show(*parts)
    trainer = prepare(config, group, task, say)
    exp = trainer.exp
    if group.index == 0:
        say(stages(exp), boundaries(exp))
        say(*(f'warning: {line}' for line in warnings_on(exp)))
        if exp.sending:
            say(f'boundary {exp.first} {exp.sending}')
    if exp.parallel.apart:
        check_residuals(exp)
        say(residuals(exp))
    seconds = first_update(trainer)
    say(
        f'compiles, and its first update runs: {seconds:.1f} s with the compilation; '
        f'{exp.points.end:,} steps in all'
    )


def stages(exp: Experiment) -> Table:
    """Parameters and output of each stage."""
    params, sent, x = parameters(exp), likes(exp), microbatch_like(exp)
    size = '' if exp.replicas == 1 else f' of one of {exp.replicas} replicas'
    table = Table(title=f'stages: a micro-batch{size} enters as {x.dtype.name}{list(x.shape)}')
    for head in ('stage', 'module', 'parameters', 'bytes', 'sends'):
        table.add_column(head, justify='left' if head == 'module' else 'right')
    for s, tree in params.items():
        sends = f'{sent[s].dtype.name}{list(sent[s].shape)}' if s < len(sent) else ''
        name = type(exp.task.stages[s]).__name__
        table.add_row(str(s), name, f'{weights_in(tree):,}', f'{nbytes(tree):,}', sends)
    return table


def boundaries(exp: Experiment) -> Table:
    """Bytes per step at each boundary, and the memory of its feedback states."""
    table = Table(title=f'boundaries, bytes per step: fwd {exp.config.fwd}, bwd {exp.config.bwd}')
    for head in (*BYTES, 'feedback'):
        table.add_column(head, justify='right')
    for row, memory in zip(message_bytes(exp), feedback_rows(exp), strict=True):
        table.add_row(*byte_cells(row), f'{memory:,} bytes')
    return table


def residuals(exp: Experiment) -> Table:
    """What each stage keeps from forwards to backwards."""
    how = 'its input' if exp.config.parallel.remat else 'residuals'
    table = Table(title=f'kept from forward to backward: {how} of a micro-batch')
    for head in ('stage', 'bytes', 'at once', 'together'):
        table.add_column(head, justify='right')
    for s, (size, most) in enumerate(residual_rows(exp)):
        table.add_row(str(s), f'{size:,}', str(most), f'{size * most:,}')
    return table


def first_update(trainer: Trainer) -> float:
    """Runs training to its first update; returns the seconds it took."""
    exp, start, size = trainer.exp, time.time(), trainer.exp.config.batch_size
    order = data.order(exp.config.seed, 0, len(exp.data.train.y))
    order = np.resize(order[: exp.epoch_steps * size], (1 + exp.config.optimizer.delay) * size)
    for after, _, _ in trainer.epoch(0, trainer.create(), order):
        jax.block_until_ready(after.step)
    return time.time() - start
