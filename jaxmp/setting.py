"""What a run does not change: data, model and optimiser, built from a config and checked.

Everything here is cheap: nothing is compiled, and a mistake in a config is answered before anything
else happens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmp import data, exchange
from jaxmp.boundary import Links
from jaxmp.devices import memory
from jaxmp.exchange import Exchange
from jaxmp.feedback import Channel, warm
from jaxmp.pipeline import Pipeline, pipeline
from jaxmp.spec import parse
from jaxmp.task import AUGMENT, IMAGE_KEYS, MODELS, TASKS, TEXT_KEYS, Config, Task, task_of
from jaxmp.wire import Like, nbytes

EVALUATIONS = ('carry', 'direct', 'frozen')
RUNTIMES = ('local', 'spmd', 'mpmd')
OPTIMISERS = ('sgd', 'adamw')
DTYPES = ('float32', 'bfloat16')
LEAST = {  # of every key that is a whole number
    'seed': 0, 'epochs': 1, 'checkpoint_every': 1, 'batch_size': 1, 'stages': 1, 'width': 1,
    'blocks': 1, 'heads': 1, 'pool': 1, 'sequence_length': 2, 'train_examples': 0,
    'test_examples': 0, 'warmup_epochs': 0, 'cosine_epochs': 0, 'micro_batches': 0, 'replicas': 0,
}  # fmt: skip
MOST = 2**32 - 1  # a seed, of which JAX keeps 32 bits
RATES = ('lr', 'momentum', 'weight_decay', 'clip_norm', 'dropout')
SWITCHES = ('download', 'remat')
IMAGES = 'digits_resnet'  # the configuration that has all keys of images


class Setting(NamedTuple):
    """What a run does not change: the data, the model in its two phases, the optimiser."""

    config: Config
    task: Task
    data: data.Dataset
    model: Pipeline
    warm_model: Pipeline
    optimiser: optax.GradientTransformation
    epoch_steps: int
    exchange: Exchange
    replicas: int


def setting(config: Config) -> Setting:
    """Loads the data and builds model and optimiser, with all the checks that need no compilation.

    Raises:
      ValueError: for a value that is not allowed; the message names the key.
    """
    check_choices(config)
    if not 0 <= config.warmup_epochs <= config.epochs:
        raise ValueError(
            f'config.warmup_epochs={config.warmup_epochs} is not between 0 and epochs='
            f'{config.epochs}; the warm-up counts inside the total'
        )
    task = task_of(config)
    tied_exchange(config, task.tied)
    found = task.data
    if config.train_examples:
        found = found._replace(train=data.take(found.train, config.train_examples))
    if config.get('test_examples', 0):
        found = found._replace(test=data.take(found.test, config.test_examples))
    examples = len(found.train.y)
    if not 1 <= config.batch_size <= examples:
        raise ValueError(f'config.batch_size={config.batch_size} is not in 1..{examples}')
    replicas, shared = replication(config)
    if config.micro_batches < 1 or config.batch_size // replicas % config.micro_batches:
        raise ValueError(
            f'config.micro_batches={config.micro_batches} does not divide config.batch_size='
            f'{config.batch_size}' + (f' / {replicas} replicas' if replicas > 1 else '') + '; a '
            'step takes that many equal cuts of its batch'
        )
    fwd, bwd = (parse(str(config[k]), {'examples': examples}) for k in ('fwd', 'bwd'))
    if fwd.per_example and replicas > 1:
        raise ValueError(
            f'config.fwd={config.fwd!r} remembers examples, and of {replicas} replicas another '
            'meets an example in every epoch; take ef21, or config.replicas=1'
        )
    if bwd.per_example:
        raise ValueError(f'config.bwd={config.bwd!r}: aqsgd is for activations; use ef or ef21')
    if fwd.per_example:
        check_ids(fwd, config.fwd, examples)
    epoch_steps = examples // config.batch_size
    model, warmed = (pipeline(task.stages, *c) for c in ((fwd, bwd), (warm(fwd), warm(bwd))))
    optimise = optimiser(config, epoch_steps)
    return Setting(
        config, task, found, model, warmed, optimise, epoch_steps, shared, replicas
    )  # fmt: skip


def replication(config: Config) -> tuple[int, Exchange]:
    """How many replicas there are, and how they share gradients.

    Raises:
      ValueError: if they do not divide the batch, the runtime has none, or the optimiser has a
        momentum that the exchange has too.
    """
    n, text = config.get('replicas', 1), str(config.get('exchange', 'mean'))
    if isinstance(n, bool) or n < 1 or config.batch_size % n:
        raise ValueError(
            f'config.replicas={n!r} does not divide config.batch_size={config.batch_size}; every '
            "replica takes an equal cut of a step's batch"
        )
    shared = exchange.parse(text)
    if n > 1 and shared.momentum and config.optimiser != 'sgd':
        raise ValueError(
            f'config.exchange={text!r} has the momentum of SGD, and config.optimiser='
            f'{config.optimiser!r} has moments of its own; take sgd, or an exchange without'
        )
    if n > 1 and shared.momentum and config.get('momentum', 0.0):
        raise ValueError(
            f'config.exchange={text!r} has a momentum of its own, and config.momentum='
            f'{config.momentum} would add a second; set config.momentum=0'
        )
    return n, shared


def tied_exchange(config: Config, tied: bool) -> Exchange:
    """How the first and the last stage share the gradients of a parameter that both hold.

    Args:
      config: ``tied_exchange``, by default ``mean``: both send all of it.
      tied: whether there is such a parameter.

    Raises:
      ValueError: if there is nothing that it could compress, or the copies would not be updated
        alike.
    """
    text = str(config.get('tied_exchange', 'mean'))
    shared = exchange.parse(text)
    if text.strip() != 'mean' and not (tied and config.runtime != 'local'):
        raise ValueError(
            f'config.tied_exchange={text!r} compresses the gradient of a token table that two '
            f'stages hold, and config.runtime={config.runtime!r} of this model sends none; take '
            "'mean', or several stages of gpt2 with config.runtime=mpmd or spmd"
        )
    if shared.momentum or shared.every > 1 or text.startswith('local_sgd'):
        raise ValueError(
            f'config.tied_exchange={text!r} brings a momentum, or shares parameters in place of '
            'gradients, and a table is updated as all other parameters are, by the same gradient '
            'in both stages; take mean, all_gather, all_reduce, scatter_gather, double_squeeze or '
            'power_sgd'
        )
    return shared


def check_choices(config: Config) -> None:
    """Raises ValueError if a key is missing, or has a value that is not allowed."""
    for key, allowed in (
        ('runtime', RUNTIMES), ('model', (*MODELS, *TASKS)), ('augment', AUGMENT),
        ('eval_feedback', EVALUATIONS), ('optimiser', OPTIMISERS), ('dtype', DTYPES),
    ):  # fmt: skip
        if key in config and config[key] not in allowed:
            raise ValueError(f'config.{key}={config[key]!r} is not one of {", ".join(allowed)}')
    check_numbers(config)
    text = config.model in TASKS
    check_keys(config, 'model', *((TEXT_KEYS, 'text_gpt2') if text else (IMAGE_KEYS, IMAGES)))
    if config.optimiser == 'sgd':
        check_keys(config, 'optimiser', ('momentum', 'weight_decay', 'cosine_epochs'), IMAGES)


def check_numbers(config: Config) -> None:
    """Raises ValueError if a key that is a number or a switch has another value."""
    for key in (k for k in config if k in (*LEAST, *RATES, *SWITCHES)):
        value = config[key]
        if key in LEAST:
            least, most = LEAST[key], MOST if key == 'seed' else 2**31 - 1
            fits = type(value) is int and least <= value <= most
            wanted = f'a whole number from {least} to {most}'
        elif key in RATES:
            fits = type(value) in (int, float) and 0 <= value < math.inf
            wanted = 'a finite number from 0'
        else:
            fits, wanted = type(value) is bool, 'True or False'
        if not fits:
            raise ValueError(f'config.{key}={value!r} is not {wanted}')


def check_keys(config: Config, key: str, needed: Sequence[str], example: str) -> None:
    """Raises ValueError if what ``key`` chooses needs a key that is not there."""
    if missing := [f'config.{k}' for k in needed if k not in config]:
        raise ValueError(
            f'config.{key}={config[key]!r} needs {", ".join(missing)}, which this configuration '
            f'does not have; give a --config that has, such as configs/{example}.py'
        )


def check_ids(fwd: Channel, text: str, examples: int) -> None:
    """Raises ValueError if the table of ``fwd`` has fewer rows than there are examples."""
    tx, _ = jax.eval_shape(lambda: fwd.init(jax.ShapeDtypeStruct((1, 1), jnp.float32)))
    if len(tx) < examples:
        raise ValueError(
            f'config.fwd={text!r} has buffers for {len(tx)} examples and the training set has '
            f'{examples}; write examples=examples'
        )


def check_memory(s: Setting) -> None:
    """Raises ValueError if the tables of ``config.fwd`` are larger than this machine's memory."""
    if not s.model.boundaries or not s.model.boundaries[0].fwd.per_example:
        return
    tables, have = nbytes(shapes(s)[1]), memory()
    if tables > have:
        raise ValueError(
            f'config.fwd={s.config.fwd!r} keeps tables of {tables / 2**30:,.1f} GiB, and there is '
            f'a memory of {have / 2**30:,.1f} GiB; take fewer config.train_examples (and '
            'examples=examples), a smaller config.width, or ef21, which keeps no examples'
        )


def optimiser(config: Config, epoch_steps: int) -> optax.GradientTransformation:
    """What ``config.optimiser`` names.

    ``sgd``: momentum, weight decay on all parameters, a cosine that moves once an epoch
    (``cosine_epochs=0``: a constant rate).
    ``adamw``: the rate falls linearly to 0 at the last step.
    """
    if config.optimiser == 'adamw':
        falling = optax.linear_schedule(config.lr, 0.0, config.epochs * epoch_steps)
        return optax.adamw(falling, weight_decay=config.get('weight_decay', 0.0))

    def rate(step: Any) -> Any:
        if not config.cosine_epochs:
            return config.lr
        epoch = step // epoch_steps
        return config.lr * 0.5 * (1 + jnp.cos(jnp.pi * epoch / config.cosine_epochs))

    decay = optax.add_decayed_weights(config.weight_decay)
    return optax.chain(decay, optax.sgd(rate, config.momentum))


def micro_like(s: Setting) -> Like:
    """Shape of a micro-batch of the model's input."""
    size = s.config.batch_size // s.replicas // s.config.micro_batches
    return jax.ShapeDtypeStruct((size, *s.task.like.shape), s.task.like.dtype)


def model_at(s: Setting, epoch: int) -> Pipeline:
    """The model of an epoch: in its warm-up, or after it."""
    return s.warm_model if epoch < s.config.warmup_epochs else s.model


def message_bytes(s: Setting) -> list[dict[str, int]]:
    """Bytes a step at each boundary: uncompressed, and each way as sent after the warm-up."""
    x, micros = micro_like(s), s.config.micro_batches
    variables, _ = shapes(s)
    rows = []
    likes = s.model.likes(variables, x, train=True)
    for i, (b, x) in enumerate(zip(s.model.boundaries, likes, strict=True), 1):
        forward, backward = (micros * n // 8 for n in b.bits(x))
        full = micros * nbytes(x)
        row = {'boundary': i, 'uncompressed': full, 'forward': forward, 'backward': backward}
        rows.append(row)
    return rows


def table_bytes(s: Setting) -> dict[str, Any]:
    """Bytes a step for the table that the first and the last stage hold: as in `message_bytes`.

    Empty where no parameter is tied.
    """
    if not s.task.tied:
        return {}
    table = shapes(s)[0][0]['params']['wte']
    sent = exchange.bytes_of(tied_exchange(s.config, True), [table], 2)
    text = str(s.config.get('tied_exchange', 'mean'))
    ways = dict.fromkeys(('forward', 'backward'), sent['sent'])
    return {'tied': {'text': text, 'uncompressed': sent['uncompressed'], **ways}}


def shapes(s: Setting) -> tuple[Any, Links]:
    """Variables of all stages and states of all boundaries, as shapes."""
    init = functools.partial(s.model.init, train=True)
    return jax.eval_shape(init, jax.random.key(0), micro_like(s))


def parameters(s: Setting) -> int:
    """How many there are."""
    return sum(p.size for v in shapes(s)[0] for p in jax.tree.leaves(v['params']))
