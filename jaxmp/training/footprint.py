"""`footprint`: the memory that a process needs for a step, counted before anything is read.

Counted are the arrays of which a step keeps all at once. Python, JAX and the data have their memory
by then. What XLA compiles, and its temporary arrays, are in neither.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax

from jaxmp.exchange.collectives import Params, Tree
from jaxmp.runtimes.placement import memory
from jaxmp.training.experiment import Experiment
from jaxmp.training.groups import Group, split
from jaxmp.training.sizes import feedback_ends, residual_rows, shapes
from jaxmp.wire import nbytes

GIB = 2**30


def footprint(exp: Experiment, stages: Iterable[int]) -> dict[str, int]:
    r"""Bytes of a process by what they are for, without what is 0.

    .. math:: 4 P + (4 + 8) T + A

    for P parameters in float32, of which T are trained by AdamW, and residuals of A bytes.

    Args:
      exp: the experiment.
      stages: those of the process, once for each replica that it has.
    """
    params = parameters(exp)
    parts = split(exp.groups, params)
    residuals, feedback = residual_rows(exp), feedback_of_stages(exp)
    total = dict.fromkeys(('parameters', 'gradients', 'optimizer', 'exchange'), 0)
    total |= {'activations': 0, 'feedback': 0}
    for s in (stages := list(stages)):
        trees = {group: part for (stage, group), part in parts.items() if stage == s}
        trained, late = nbytes(list(trees.values())), exp.delays[s] if exp.delays else 0
        # Late gradients wait; in a pipeline that stays full it is the weights of their forwards,
        # but in the last stage, which has run its backwards.
        weights = not exp.parallel.joined and s < len(params) - 1
        total['parameters'] += nbytes(params[s]) + trained * late * weights
        total['gradients'] += trained * (1 + late * (not weights))
        total['optimizer'] += sum(_state(g.optimizer.init, part) for g, part in trees.items())
        total['exchange'] += sum(_exchange(g, part, exp.replicas) for g, part in trees.items())
        total['activations'] += residuals[s][0] * residuals[s][1]
        total['feedback'] += feedback[s]
    total['parameters'] -= _twice(exp, params, stages)
    return {name: size for name, size in total.items() if size}


def parameters(exp: Experiment) -> dict[int, Params]:
    """Shapes and dtypes of each stage's parameters, as a run begins with them."""
    drawn, key = shapes(exp)[0], jax.random.key(0)
    start = lambda s, v: jax.eval_shape(functools.partial(exp.task.start, s), v, key)
    return {s: start(s, {'params': v['params']})['params'] for s, v in enumerate(drawn)}


def feedback_of_stages(exp: Experiment) -> list[int]:
    """Bytes of the feedback states at the ends of each stage."""
    sizes = [0] * len(exp.task.stages)
    for i, (sender, receiver, gradient_sender, gradient_receiver) in enumerate(feedback_ends(exp)):
        sizes[i] += sender + gradient_receiver
        sizes[i + 1] += receiver + gradient_sender
    return sizes


def _state(init: Callable[[Params], Tree], part: Params) -> int:
    return nbytes(jax.eval_shape(init, part))


def _exchange(group: Group, part: Params, replicas: int) -> int:
    if replicas == 1:
        return 0
    return _state(lambda gradients: group.exchange.init(gradients, replicas), part)


def _twice(exp: Experiment, params: Mapping[int, Params], stages: list[int]) -> int:
    """Bytes of a frozen table that two stages of the process share."""
    ends = 0, len(exp.task.stages) - 1
    if not exp.task.tied or exp.task.copied or not set(ends) <= set(stages):
        return 0
    leaf = params[0]
    for name in exp.task.tied.path:
        leaf = leaf[name]
    return nbytes(leaf) * min(stages.count(s) for s in ends)


def described(sizes: Mapping[str, int]) -> str:
    """One line of a footprint.

    >>> described({'parameters': 2**30, 'gradients': 2**29})
    'at least 1.50 GiB: parameters 1.00, gradients 0.50'
    """
    parts = ', '.join(f'{name} {size / GIB:.2f}' for name, size in sizes.items())
    return f'at least {sum(sizes.values()) / GIB:.2f} GiB: {parts}'


def status(name: str) -> int:
    """Bytes that Linux counts under a name of ``/proc/self/status``; elsewhere 0."""
    file = Path('/proc/self/status')
    found = re.search(rf'{name}:\s*(\d+)', file.read_text() if file.exists() else '')
    return 1024 * int(found[1]) if found else 0


def check(exp: Experiment, sizes: Mapping[str, int], devices: int) -> tuple[str, int]:
    """A line that says what a process needs and what it has, and the bytes that it needs at least.

    Args:
      exp: the experiment.
      sizes: `footprint` of the process.
      devices: how many it uses.

    Raises:
      ValueError: if it has less than it needs; the message names the keys that help.
    """
    have = memory() * (1 if jax.default_backend() == 'cpu' else devices)
    line = f'memory of a process: {described(sizes)}; it has {have / GIB:.2f} GiB'
    if before := status('VmRSS') if jax.default_backend() == 'cpu' else 0:
        line += f', of which Python, JAX and data have {before / GIB:.2f}'
    if (needs := sum(sizes.values()) + before) <= have:
        return line, needs
    c, helps = exp.config, []
    low_rank = c.model.train.startswith('lora')
    if c.model.name == 'pretrained' and not low_rank:
        helps.append("config.model.train='lora(8)'")
    fewest = 'file' if c.model.path.endswith('.gguf') else 'bfloat16'
    wide = ('float32',) if fewest == 'file' else ('', 'float32')  # empty takes a file's blocks
    if low_rank and c.model.param_dtype in wide:  # of what is trained it would save nothing
        helps.append(f'config.model.param_dtype={fewest!r}')
    if sizes.get('activations', 0) > sum(sizes.values()) / 10:
        helps += [] if c.model.remat else ['config.model.remat=True']
        helps += [f'a config.batch_size below {c.batch_size}'] if c.batch_size > 1 else []
    helps.append('stages in more processes (config.parallel.runtime=mpmd)')
    raise ValueError(f'{line}; try {", ".join(helps)}')
