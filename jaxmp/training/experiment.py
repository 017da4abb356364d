"""`Experiment`: dataset, model and optimizer, built from a validated configuration.

Everything here is cheap: nothing is compiled, and a mistake in a configuration is answered before
anything else happens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict

from jaxmp import config as schema
from jaxmp import data, exchange
from jaxmp.boundary import Boundary, FeedbackState
from jaxmp.boundary.pipeline import Pipeline, Variables, pipeline
from jaxmp.config import Config
from jaxmp.exchange import Exchange
from jaxmp.exchange.collectives import Params
from jaxmp.feedback import Channel
from jaxmp.feedback.channel import BY_TOKEN
from jaxmp.grammar import own_words
from jaxmp.grammar.sinks import warnings_of
from jaxmp.runtimes.compiler import check_compiler
from jaxmp.runtimes.trained import everything, of_stage, part
from jaxmp.spec import SpecError, parse
from jaxmp.training.groups import Group, Groups, rest, split
from jaxmp.training.late import check_delay, delays_of
from jaxmp.training.optimizer import Optimizer, optimizer_of
from jaxmp.training.parallel import Parallel, actions_of, apart, parallel_of
from jaxmp.training.phases import Phase, phases_of
from jaxmp.training.tasks.named import task_of
from jaxmp.training.tasks.task import Task
from jaxmp.training.workdir.points import Points, points_of
from jaxmp.wire import Like


class Experiment(NamedTuple):
    """What a run does not change.

    Attributes:
      config: validated.
      task: model and scores.
      data: what is trained on and tested, perhaps fewer examples than the task has.
      model: stages and boundaries, as ``config.fwd`` and ``config.bwd`` say.
      phases: epochs with other boundaries.
      groups: the parameters that are trained, and how each group is exchanged and updated.
      epoch_steps: steps per epoch.
      exchange: between replicas.
      first: number of the first stage that has trained parameters, before which no gradient goes.
      kept: number of examples that the boundary before it carries once, or 0; see
        `jaxmp.training.unchanging`.
      sending: what that boundary does, and why; empty where nothing before it is frozen.
    """

    config: Config
    task: Task
    data: data.Dataset
    model: Pipeline
    phases: tuple[Phase, ...]
    groups: Groups
    epoch_steps: int
    exchange: Exchange
    first: int = 0
    kept: int = 0
    sending: str = ''

    @property
    def parallel(self) -> Parallel:
        """Where replicas and stages are."""
        return parallel_of(self.config, len(self.task.stages))

    @property
    def delays(self) -> tuple[int, ...]:
        """Steps that the gradients of each stage are late; none where all are on time."""
        c, task = self.config.optimizer, self.task
        return delays_of(c.delay, c.delay_by_stage, len(task.stages), bool(task.copied))

    @property
    def points(self) -> Points:
        """The steps at which the run is tested, saved and ends."""
        return points_of(self.config, self.epoch_steps)

    @property
    def replicas(self) -> int:
        """Their number."""
        return self.config.parallel.replicas

    def boundaries(self, epoch: int) -> tuple[Boundary, ...]:
        """The boundaries of an epoch, counted from 0."""
        of_phases = (p.boundaries for p in self.phases if epoch in p.epochs)
        return next(of_phases, self.model.boundaries)


def experiment_of(config: Config, task: Task | None = None) -> Experiment:
    """Loads the data and builds model and optimizer, with all checks that need no compilation.

    Args:
      config: all keys, as `jaxmp.config.complete` gives it.
      task: in place of the one that ``config.model`` and ``config.data`` name.

    Raises:
      ValueError: for a value that is not allowed (the message names its key), or a wrong JAX.
    """
    check_compiler()
    schema.check(config)
    task = task_of(config) if task is None else task
    actions_of(config, len(task.stages))
    between = tied_exchange(config, bool(task.copied) and apart(config))
    examples = sized(task.data, config)
    data.check(examples, bool(vocabulary(task)))
    count = len(examples.train.y)
    shared = replication(config)
    if config.batch_size > count:
        raise ValueError(f'config.batch_size={config.batch_size} is not in 1..{count}')
    names = words_of(config, task, count)
    model = pipeline_of(config, task, names)
    epoch_steps = count // config.batch_size
    epochs = points_of(config, epoch_steps).epochs
    phases = phases_of(config, epochs, model.boundaries, names)
    cuts = [*model.boundaries, *(cut for p in phases for cut in p.boundaries)]
    check_delay(config, cuts, len(task.stages))
    exp = Experiment(config, task, examples, model, phases, (), epoch_steps, shared)
    delays = exp.delays or (0,) * len(task.stages)
    idle = groups_of(task, [optax.identity() for _ in delays], shared, between)

    def parameters() -> list[Params]:
        trees = [v.get('params', {}) for v in variables_like(exp.model, microbatch_like(exp))[0]]
        return [*split(idle, dict(enumerate(trees))).values()]

    made = {n: optimizer_of(config, epoch_steps, n, parameters) for n in {*delays}}
    groups = groups_of(task, [made[n] for n in delays], shared, between)
    first = first_trained(exp) if exp.parallel.skips else 0
    return exp._replace(groups=groups, first=first)


def first_trained(exp: Experiment) -> int:
    """The number of the first stage with a parameter that is trained.

    Raises:
      ValueError: if there is none.
    """
    select = exp.task.trained
    if select is everything:
        return 0
    params = [v.get('params', {}) for v in variables_like(exp.model, microbatch_like(exp))[0]]
    here = lambda s, tree: jax.tree.leaves(part(of_stage(select, s), tree))
    trained = [s for s, tree in enumerate(params) if here(s, tree)]
    if not trained:
        names = ['/'.join(path) for tree in params for path in flatten_dict(tree)]
        raise ValueError(
            f'none of the parameters of {len(params)} stages is trained; select some of '
            f'{", ".join(dict.fromkeys(names[:6]))}{", ..." if len(names) > 6 else ""}'
        )
    return trained[0]


@functools.lru_cache(maxsize=4)  # many ask, and to trace a network takes a second
def variables_like(model: Pipeline, x: Like) -> tuple[Variables, FeedbackState]:
    """Variables of all stages and states of all boundaries, as shapes, for micro-batches ``x``."""
    return jax.eval_shape(functools.partial(model.init, train=True), jax.random.key(0), x)


def groups_of(
    task: Task, optimizers: Sequence[Optimizer], shared: Exchange, between: Exchange
) -> Groups:
    """The groups of a task: a tied table, if it is trained, and the rest of each stage.

    Args:
      task: says what is tied, and what is trained.
      optimizers: of each stage; the table has that of the first.
      shared: how replicas exchange.
      between: how the two stages of a tied table exchange.
    """
    n, tied = len(task.stages), task.copied
    own = rest(n, optimizers[0], shared, task.trained)
    groups = tuple(g._replace(optimizer=o) for g, o in zip(own, optimizers, strict=True))
    if tied:
        table = Group((0, n - 1), tied.selects, n, optimizers[0], shared, between)
        groups = (table, *groups)
    return groups


def sized(dataset: data.Dataset, config: Config) -> data.Dataset:
    """The data set with as many examples of each split as the configuration asks for.

    Raises:
      ValueError: if it has fewer.
    """
    for name in ('train', 'test'):
        if count := config.data[f'{name}_examples']:
            try:
                rows = data.take(getattr(dataset, name), count)
            except ValueError as error:
                raise ValueError(f'config.data.{name}_examples={count}: {error}') from None
            dataset = dataset._replace(**{name: rows})
    return dataset


def words_of(config: Config, task: Task, examples: int) -> dict[str, Any]:
    """The words that a channel's text may use besides those of the algebra."""
    numbers = {'examples': examples, 'vocabulary': vocabulary(task)}
    return {k: n for k, n in numbers.items() if n} | own_words(config.codecs)


def vocabulary(task: Task) -> int:
    """The number of the input's tokens; 0 if it is of numbers."""
    return task.data.classes if jnp.issubdtype(task.like.dtype, jnp.integer) else 0


def pipeline_of(config: Config, task: Task, names: dict[str, Any]) -> Pipeline:
    """The model with its boundaries.

    Raises:
      ValueError: if a text names no channel, or a channel that does not fit.
    """
    n = len(task.stages) - 1
    fwd, bwd = (channels_of(config, way, names, n) for way in ('fwd', 'bwd'))
    if any(c.state_of == 'example' for c in fwd) and config.parallel.replicas > 1:
        raise ValueError(
            f'config.fwd={config.fwd!r} has a state per example, and of several replicas another '
            'meets an example in every epoch; take ef21, or config.parallel.replicas=1'
        )
    if any(c.state_of == 'example' for c in bwd):
        raise ValueError(f'config.bwd={config.bwd!r}: aqsgd is for activations; use ef or ef21')
    for channel in fwd:
        if channel.state_of == 'example':
            check_ids(channel, config.fwd, names['examples'])
    for way, channels in (('fwd', fwd), ('bwd', bwd)):
        for channel in channels:
            if 'tokens' in channel.needs:
                check_tokens(channel, way, config[way], vocabulary(task))
    return pipeline(task.stages, fwd, bwd)


def channels_of(config: Config, way: str, names: dict[str, Any], boundaries: int) -> list[Channel]:
    """The channels of a direction: one for all boundaries, or one per boundary, between ``;``.

    Raises:
      ValueError: if a text names none (an exchange between replicas is told where it belongs), or
        there are as many texts as neither.
    """
    texts = config[way].split(';')
    try:
        channels = [parse(text, names) for text in texts]
    except SpecError:
        between = [w for w in re.findall(r'\w+', config[way]) if w in exchange.RULES]
        if not between:
            raise
        raise ValueError(
            f'config.{way}={config[way]!r}: {between[0]} is how replicas share gradients; give it '
            'as config.exchange, with config.parallel.replicas=2 or more'
        ) from None
    if len(channels) == 1:
        return channels * boundaries
    if len(channels) != boundaries:
        raise ValueError(
            f'config.{way}={config[way]!r} has {len(channels)} channels and the model '
            f'{boundaries} boundaries; give one for all, or one per boundary with ; between them'
        )
    return channels


def replication(config: Config) -> Exchange:
    """How replicas share gradients.

    Raises:
      ValueError: if replicas or micro-batches do not divide the batch, or the optimizer has a
        momentum that the exchange has too.
    """
    n, text = config.parallel.replicas, config.exchange
    if config.batch_size % n:
        raise ValueError(
            f'config.parallel.replicas={n} does not divide config.batch_size={config.batch_size}; '
            "every replica takes an equal cut of a step's batch"
        )
    cuts = config.parallel.num_microbatches
    if config.batch_size // n % cuts:
        raise ValueError(
            f'config.parallel.num_microbatches={cuts} does not divide config.batch_size='
            f'{config.batch_size}' + (f' / {n} replicas' if n > 1 else '') + '; a step takes that '
            'many equal cuts of its batch'
        )
    shared = exchange.parse(text, own_words(config.codecs))
    # Two momenta, before and after the exchange, would lengthen a step twice.
    if n > 1 and shared.momentum and config.optimizer.name != 'sgd':
        raise ValueError(
            f'config.exchange={text!r} has the momentum of SGD, and config.optimizer.name='
            f'{config.optimizer.name!r} has moments of its own; take sgd, or an exchange without'
        )
    if n > 1 and shared.momentum and config.optimizer.momentum:
        raise ValueError(
            f'config.exchange={text!r} has a momentum of its own, and config.optimizer.momentum='
            f'{config.optimizer.momentum} would add a second; set config.optimizer.momentum=0'
        )
    return shared


def tied_exchange(config: Config, tied: bool) -> Exchange:
    """How the first and the last stage share the gradients of a parameter that both hold.

    Args:
      config: ``tied_exchange``, by default ``mean``: both send all of it.
      tied: whether there is such a parameter, and its copies are apart.

    Raises:
      ValueError: if there is nothing that it could compress, or the copies would not be updated
        alike.
    """
    text, runtime = config.tied_exchange, config.parallel.runtime
    shared = exchange.parse(text, own_words(config.codecs))
    if text.strip() != 'mean' and not tied:
        raise ValueError(
            f'config.tied_exchange={text!r} compresses the gradient of a token table that two '
            f'stages hold, and config.parallel.runtime={runtime!r} of this model sends none; take '
            "'mean', or several stages of gpt2 with config.model.tied=True and "
            'config.parallel.runtime=mpmd or spmd'
        )
    if shared.momentum or shared.shares_params:
        raise ValueError(
            f'config.tied_exchange={text!r} brings a momentum, or shares parameters in place of '
            'gradients, and a table is updated as all other parameters are, by the same gradient '
            'in both stages; take mean, all_gather, all_reduce, scatter_gather, double_squeeze or '
            'power_sgd'
        )
    if shared.by_epoch:
        raise ValueError(
            f'config.tied_exchange={text!r} has epochs of its own, at first without compression or '
            'with less, and a table is exchanged alike in all epochs; take one without a warm-up'
        )
    return shared


def check_ids(fwd: Channel, text: str, examples: int) -> None:
    """Raises ValueError if the table of ``fwd`` has fewer rows than there are examples."""
    if (rows := rows_of(fwd)) < examples:
        raise ValueError(
            f'config.fwd={text!r} has buffers for {rows} examples and the training set has '
            f'{examples}; write examples=examples'
        )


def check_tokens(channel: Channel, way: str, text: str, vocabulary: int) -> None:
    """Raises ValueError unless a channel that needs tokens fits its direction and the data's."""
    key = f'config.{way}={text!r}'
    if way == 'fwd' and channel.state_of == 'target':
        raise ValueError(
            f'{key}: an anchor of the target would tell the answer to the stages that are to '
            'predict it; target=True is for gradients, config.bwd'
        )
    if way == 'bwd' and channel.state_of == 'token':
        raise ValueError(
            f'{key}: anchored is for activations; a gradient follows the next token, so write '
            'anchored(..., target=True), or take ef or ef21'
        )
    if not vocabulary:
        reads = 'keeps an anchor per token' if channel.state_of in BY_TOKEN else 'reads tokens'
        raise ValueError(
            f'{key} {reads}, and the input of this model has no tokens but '
            f'numbers; take {"aqsgd, which keeps examples, or " * (way == "fwd")}ef21'
        )
    if channel.state_of in BY_TOKEN and (rows := rows_of(channel)) < vocabulary:
        raise ValueError(
            f'{key} has anchors for {rows} tokens and the data has {vocabulary}; write '
            'vocabulary=vocabulary'
        )


def rows_of(channel: Channel) -> int:
    """The rows of a channel's table of examples or tokens."""
    tx, _ = jax.eval_shape(lambda: channel.init(jax.ShapeDtypeStruct((1, 1), jnp.float32)))
    return len(jax.tree.leaves(tx)[0])


def warnings_on(exp: Experiment) -> list[str]:
    """A line for what compresses nothing, and for each forward channel that breaks on text.

    The latter are of models whose input is of token ids. Each codec takes a compilation.
    """
    c, idle = exp.config, 'compresses nothing, of one'
    alone = [f'config.{k}={c[k]!r} {idle} stage; give config.model.stages=2 or more'
             for k in ('fwd', 'bwd') if not exp.model.boundaries and c[k] != 'raw']  # fmt: skip
    if exp.replicas == 1 and c.exchange != 'mean':
        alone.append(
            f'config.exchange={c.exchange!r} {idle} replica; give config.parallel.replicas=2'
        )
    boundaries = [*exp.model.boundaries, *(b for p in exp.phases for b in p.boundaries)]
    return alone + warnings_of((b.fwd for b in boundaries), exp.task.like)


def microbatch_like(exp: Experiment) -> Like:
    """Shape of a micro-batch of the model's input."""
    like = exp.task.like
    size = exp.config.batch_size // exp.replicas // exp.config.parallel.num_microbatches
    return jax.ShapeDtypeStruct((size, *like.shape), like.dtype)
