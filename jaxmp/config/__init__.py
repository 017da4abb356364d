"""`KEYS`: every key of a configuration, with its default, the values it may have and one line.

A configuration is a nested `ml_collections.ConfigDict`, locked, so that a misspelt key is refused.
A file in ``configs/`` states what differs from `default`. A value that names a thing (a model, an
optimizer, ...) may also be the import path of one's own: ``'package.module:name'``, or
``'file.py:name'``; see `jaxmp.config.files`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_collections

from jaxmp.config.files import load as load
from jaxmp.terminal import hint

Config = Any  # an ml_collections.ConfigDict, whose attributes have no static types
Nested = Mapping[str, Any]  # a configuration by groups, as a file of `configs/` has it
Flat = dict[str, Any]  # its values by dotted names
Summary = dict[str, Any]  # of a finished run, as summary.json holds it
ALIKE = 0.7  # least likeness of a misspelt key to the one that is meant, as difflib counts it
TEXTS = ('alice', 'wikitext-2', 'wikitext-2-raw')  # of the package, by data.name
LARGEST = {'seed': 2**32 - 1}  # of a key; JAX keeps 32 bits of a seed
LEFT = {  # of a key the first word of values that are no longer allowed
    ('parallel.schedule', 'async'): 'a pipeline that stays full is config.optimizer.delay=N',
    ('optimizer.correction', 'scale'): 'it lost to none, and left; commit a88a3d2 has it',
    ('optimizer.correction', 'compensate'): 'it gained nothing, and left; commit a88a3d2 has it',
}
LEFT_KEYS = {  # by name: the value that says nothing, and what says the others now
    'warmup_epochs': (0, "config.phases='raw@:N' sends the first N epochs uncompressed"),
    'optimizer.cosine_epochs': (0, "config.optimizer.schedule='cosine(N)' reaches 0 in N epochs"),
    'optimizer.decay': ('20%', "config.optimizer.schedule='wsd(20%)' falls to 0 over the last 20%"),
    'model.bottleneck': (0, 'study/bottleneck.py of the repository builds such a model'),
    'model.embed_every_stage': (False, 'study/bottleneck.py of the repository builds such a model'),
    'eval_feedback': ('carry', 'a test carries the feedback states on; or read its score off'),
    'parallel.send_once': (True, 'what frozen stages give of an example is always sent once'),
    'data.cache': ('~/.cache/jaxmp/text', 'give XDG_CACHE_HOME in the environment'),
}
LENGTH = re.compile(r'(\d+) ?steps?|(\d+(?:\.\d+)?) ?(epoch|%|)s?')


class Key(NamedTuple):
    """What a configuration may hold under one name.

    Attributes:
      default: its value where nothing is said; its type is the key's.
      line: what it means.
      least: smallest value of a number.
      words: the values that are allowed, of a text that is one of a few words.
      pattern: of further values that are allowed, a regular expression.
      such: an example of them, with what it means.
      own: of a key that also takes an import path: how the named function is called, and its
        result.
      length: the key is a length of training, as `length_of` reads it.
      model: the only model that reads the key; empty if every model does.
      runtime: the runtimes that read the key, with a space between; likewise.
      optimizer: the only optimizer that reads the key; likewise.
      idle: the key decides no number of a run: where files lie, what is kept.
      free: the key may change where a run goes on from its checkpoint.
    """

    default: bool | int | float | str | None
    line: str
    least: float = 0
    words: tuple[str, ...] = ()
    pattern: str = ''
    such: str = ''
    own: str = ''
    length: bool = False
    model: str = ''
    runtime: str = ''
    optimizer: str = ''
    idle: bool = False
    free: bool = False


KEYS: Mapping[str, Key] = {
    'name': Key('run', 'of the run: title of its tables, part of runs/NAME-FWD-BWD', free=True),
    'seed': Key(0, 'of everything random'),
    # What is learned from what.
    'data.name': Key(
        'digits', 'data set or text; owner/name of the hub, or a folder/, by the package datasets',
        words=('digits', 'mnist', 'cifar10', *TEXTS),
        pattern=r'[^:]*/[^:]*', own='load(config) -> jaxmp.data.Dataset'),
    'data.files': Key('', "text in place of data.name: a glob of .txt and .jsonl, 'notes/*.txt'"),
    'data.test_files': Key('', 'a glob of those to test on; empty: the end of each of data.files'),
    'data.test_share': Key(0.05, 'of a text without a test of its own that is held out for one'),
    'data.field': Key('text', 'of each line of a .jsonl: its text, or its chat messages'),
    'data.dir': Key('', 'folder of its files; digits and alice need none', idle=True, free=True),
    'data.download': Key(False, 'fetch it into data.dir if missing', idle=True, free=True),
    'data.train_examples': Key(0, 'how many of the training split; 0: all'),
    'data.test_examples': Key(0, 'how many of the test split; 0: all'),
    'data.pool': Key(1, 'side of the squares of pixels whose mean is one pixel', 1),
    'data.augment': Key('none', 'of training images', words=('none', 'crop_flip')),
    'data.sequence_length': Key(128, 'tokens per example', 2, model='gpt2 pretrained'),
    'data.tokenizer': Key(
        'bytes', 'bytes, bpe-N to learn N tokens, a folder with tokenizer.json, or a .gguf file',
        model='gpt2 pretrained', idle=True),
    'model.name': Key(
        'resnet18', 'network', words=('resnet18', 'lenet', 'gpt2', 'pretrained'),
        own='build(config, dataset) -> a sequence of stages, or a jaxmp.Task'),
    'model.width': Key(16, 'channels of the first block; of gpt2 the size of the embedding', 1),
    'model.norm': Key(
        'batch', 'what follows each convolution', words=('batch', 'group', 'none'),
        model='resnet18'),
    'model.stages': Key(
        4, 'pipeline stages; resnet18 has four, lenet two', 1, model='gpt2 pretrained'),
    'model.cuts': Key(
        '', "blocks before each boundary, '8 16 23', in place of model.stages",
        model='gpt2 pretrained'),
    'model.blocks': Key(4, 'transformer blocks', 1, model='gpt2'),
    'model.heads': Key(4, 'attention heads', 1, model='gpt2'),
    'model.dropout': Key(0.0, 'probability', model='gpt2'),
    'model.tied': Key(
        True, 'one token table to embed and to score; a checkpoint says it itself', model='gpt2'),
    'model.dtype': Key(
        'float32', 'of the matrix products', words=('float32', 'bfloat16'),
        model='gpt2 pretrained'),
    'model.remat': Key(False, 'recompute blocks in the backward', model='gpt2 pretrained'),
    'model.entrance': Key(
        False, 'each later stage first scales and shifts its channels, as jaxmp fold sets'),
    'model.path': Key(
        '', "checkpoint: a folder in Hugging Face's layout such as WORKDIR/model, a GGUF file, or "
        'owner/name of the hub', model='gpt2 pretrained', idle=True),
    'model.train': Key(
        'no_table', "of a checkpoint: all; no_table; lora(8); or patterns of names, '*norm*'",
        model='pretrained'),
    'model.param_dtype': Key(
        'float32', "of parameters but those of lora; file: a GGUF file's own blocks, as they are; "
        'bfloat16: the optimizer has float32 copies; empty: file under lora, else float32',
        words=('float32', 'bfloat16', 'file', ''), model='pretrained'),
    'model.merge': Key(
        False, 'add the updates of lora to their kernels in WORKDIR/model', model='pretrained',
        idle=True, free=True),
    # What stages, and replicas, send each other.
    'fwd': Key('raw', 'channel of the activations, a text of the algebra; per boundary with `;`'),
    'bwd': Key('raw', 'channel of their gradients, likewise'),
    'exchange': Key('mean', 'how replicas share gradients, a text of the algebra'),
    'tied_exchange': Key('mean', "how two stages share the token table's gradient: an exchange"),
    'codecs': Key('', 'own modules or files, with commas, whose words these texts may use'),
    'phases': Key(
        '', 'codecs in place of fwd and bwd in some epochs: `raw@:1; lloyd(2) | lloyd(4)@8:13`; '
        '`raw@:1` is a warm-up, which fills the feedback states'),
    'metric': Key(
        '', "reported first; empty: the model's own", words=('', 'accuracy', 'perplexity', 'loss'),
        own='metric(output, y) -> a value per example, or a jaxmp.Metric'),
    # How it is trained.
    'epochs': Key(15, 'passes over the training split', 1, free=True),
    'steps': Key(0, 'length of the run in steps, in place of epochs; 0: epochs says', free=True),
    'batch_size': Key(64, 'examples per step, of all replicas', 1),
    'optimizer.name': Key(
        'sgd', 'optimizer', words=('sgd', 'adamw', 'muon'),
        own='make(config, rate) -> optax.GradientTransformation'),
    'optimizer.lr': Key(0.02, 'learning rate'),
    'optimizer.schedule': Key(
        'constant', 'of the learning rate, once it is warm; cosine, linear and wsd end at 0; '
        '`cosine(20)`: half a period of 20 epochs, moving by epochs; `wsd(10%)`: falls over the '
        'last 10%, else 20%',
        words=('constant', 'cosine', 'linear', 'wsd'),
        pattern=rf'cosine\([1-9]\d{{0,8}}\)|wsd\(({LENGTH.pattern})\)',
        such="one with a length, such as 'cosine(20)' epochs or 'wsd(10%)' of the run",
        own='make(config, steps_per_epoch) -> step -> rate'),
    'optimizer.warmup': Key(
        '0 steps', "over which the rate rises from 0: '100 steps', '1 epoch' or '3%' of the run",
        length=True),
    'optimizer.momentum': Key(0.0, 'of sgd'),
    'optimizer.adamw_scale': Key(
        1.0, 'times the rate for what muon leaves to AdamW: tables and vectors',
        optimizer='muon'),
    'optimizer.weight_decay': Key(0.0, 'of all parameters'),
    'optimizer.clip_norm': Key(0.0, 'largest global norm of the gradients; 0: not clipped'),
    'optimizer.delay': Key(
        0, 'steps that gradients come late; under mpmd the pipeline is then never emptied'),
    'optimizer.delay_by_stage': Key(
        False, 'a stage only as late as its own way takes; each group then clips by its own norm'),
    'optimizer.correction': Key(
        'none', 'of late gradients, perhaps with its strength, `predict(0.5)`',
        words=('none', 'predict'), pattern=r'predict\(\d{0,3}\.?\d+\)',
        such="one with a strength from 0, such as 'predict(0.5)'"),
    # Where it runs.
    'parallel.runtime': Key(
        'local', 'local: one program; spmd: one over a mesh; mpmd: one per stage',
        words=('local', 'spmd', 'mpmd'), free=True),
    'parallel.replicas': Key(1, 'of the whole model, each on a cut of the batch', 1),
    'parallel.elastic': Key(
        False, 'replicas are processes that may come and go between the rounds of diloco'),
    'parallel.num_microbatches': Key(1, 'equal cuts of a batch, which follow each other', 1),
    'parallel.remat': Key(
        False, 'run a stage again in its backward instead of keeping its residuals',
        runtime='mpmd spmd', free=True),
    'parallel.schedule': Key(
        '1f1b', 'order of forwards and backwards under mpmd; `eager_1f1b(N)`, `zb_h2(N)`: N '
        'forwards ahead per later stage; `zb_h2(N, K)`: only the last K backwards in two halves',
        words=('1f1b', 'gpipe', 'eager_1f1b', 'interleaved', 'zb_h1', 'zb_h2', 'zb_v'),
        pattern=r'(eager_1f1b|zb_h2)\([1-9]\d{0,3}\)|zb_h2\([1-9]\d{0,3}, ?[1-9]\d{0,3}\)',
        own='make(stages, microbatches) -> a schedule, as jaxmp.runtimes.schedule.timed makes',
        runtime='mpmd', free=True),
    'parallel.place': Key(
        '', "the process of each stage, '0 0 1'; empty: runs of equal length", runtime='mpmd',
        free=True),
    'parallel.link_rate': Key(
        0.0, 'Mbit/s of emulated links between stages under mpmd; 0: as they are', runtime='mpmd',
        free=True),
    'parallel.link_delay': Key(
        0.0, 'ms that each message takes besides', runtime='mpmd', free=True),
    'parallel.profile': Key(
        False, 'say where the time of one step went, and trace some into profile', runtime='mpmd',
        idle=True, free=True),
    # What is kept.
    'probe': Key(
        'off', 'errors and feedback norms at the boundaries, before each test',
        words=('off', 'epochs'), idle=True, free=True),
    'eval_every': Key(
        1, "how often it is tested: a number of epochs, '500 steps' or '10%' of the run", 1,
        length=True, free=True),
    'checkpoint_every': Key(
        1, 'how often it is saved, likewise', 1, length=True, idle=True, free=True),
}  # fmt: skip
FREE = frozenset(name for name, key in KEYS.items() if key.free)
IDLE = frozenset(name for name, key in KEYS.items() if key.idle)
KINDS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'a text'}


def default() -> Config:
    """All keys with their defaults, locked.

    >>> c = default()
    >>> c.model.width, c.parallel.runtime
    (16, 'local')
    """
    return complete({})


def complete(config: Nested | ml_collections.ConfigDict) -> Config:
    """``config`` with the default of every key that it lacks, locked; further keys stay.

    Args:
      config: nested, such as ``{'model': {'width': 8}}``; a file of ``configs/`` has all keys.
    """
    groups = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else dict(config)
    values = {name: key.default for name, key in KEYS.items()} | current(flat(groups))
    for name in (name for name, key in KEYS.items() if key.length):  # may be a number or a text
        values[name] = ml_collections.FieldReference(values[name], object)
    return ml_collections.ConfigDict(nested(values)).lock()


def flat(config: Nested) -> Flat:
    """A nested configuration as one level of dotted names.

    >>> flat({'seed': 0, 'model': {'width': 8}})
    {'seed': 0, 'model.width': 8}
    """

    def items(level: Nested, before: str) -> Iterator[tuple[str, object]]:
        for name, value in level.items():
            if isinstance(value, Mapping):
                yield from items(value, f'{before}{name}.')
            else:
                yield f'{before}{name}', value

    return dict(items(config, ''))


def current(values: Flat) -> Flat:
    """``values``, perhaps of an older version, without the keys that have left since.

    A model of one's own keeps its keys under ``model``, whatever their names.

    Raises:
      ValueError: if such a key says something, which would be lost.

    >>> current({'seed': 0, 'warmup_epochs': 0})
    {'seed': 0}
    """
    is_own = ':' in str(values.get('model.name'))
    left = {n: LEFT_KEYS[n] for n in LEFT_KEYS if not (is_own and n.startswith('model.'))}
    for name, (idle, now) in left.items():
        if values.get(name, idle) != idle:
            raise ValueError(f'config.{name}={values[name]!r} has left; {now}')
    return {name: value for name, value in values.items() if name not in left}


def length_of(value: object) -> tuple[float, str] | None:
    """A length of training as a number and its unit, ``steps``, ``epochs`` or ``%`` of the run.

    A number by itself counts epochs; None is for a value that is no length.

    >>> length_of('500 steps'), length_of('0.5 epochs'), length_of(2), length_of('10%')
    ((500.0, 'steps'), (0.5, 'epochs'), (2.0, 'epochs'), (10.0, '%'))
    >>> length_of('half a step')
    """
    match = LENGTH.fullmatch(str(value).strip())
    if not match:
        return None
    if match[1]:
        return float(match[1]), 'steps'
    return float(match[2]), '%' if match[3] == '%' else 'epochs'


def is_text(name: str, files: str) -> bool:
    """Whether ``data.name`` and ``data.files`` name a text: of the package, in files, of the hub.

    >>> is_text('alice', ''), is_text('digits', '*.txt'), is_text('owner/name', '')
    (True, True, True)
    >>> is_text('digits', ''), is_text('folder/mine.py:load', '')
    (False, False)
    """
    return bool(files) or name in TEXTS or ('/' in name and ':' not in name)


def reads_text(config: Nested) -> bool:
    """Whether a run's nested ``config`` is of a language model.

    >>> reads_text({'data': {'name': 'alice'}}), reads_text({})
    (True, False)
    """
    values = settings(config)
    models = 'gpt2', 'pretrained'
    return values['model.name'] in models or is_text(values['data.name'], values['data.files'])


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Inverse of `flat`."""
    config: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split('.')
        level = config
        for group in groups:
            level = level.setdefault(group, {})
        level[last] = value
    return config


def settings(config: Nested) -> Flat:
    """What of ``config`` decides a run's numbers, by dotted names; what it lacks is its default.

    >>> settings({'optimizer': {'lr': 0.1}, 'data': {'dir': 'here'}})['exchange']
    'mean'
    """
    values = {name: key.default for name, key in KEYS.items()} | current(flat(config))
    return {name: value for name, value in values.items() if name not in IDLE}


def check(config: Config) -> None:
    """Raises ValueError if a key has a value that is not allowed, or one that nothing reads."""
    values = flat(config.to_dict())
    for name, key in KEYS.items():
        if problem := _problem(name, key, values[name]):
            raise ValueError(f'config.{name}={values[name]!r} {problem}')
    for name, key in KEYS.items():
        readers_of = {
            'model.name': key.model, 'parallel.runtime': key.runtime,
            'optimizer.name': key.optimizer,
        }  # fmt: skip
        for of, only in readers_of.items():
            readers = only.split()
            idle = readers and values[of] not in readers and ':' not in values[of]
            if idle and values[name] != key.default:
                texts = ' or '.join(map(repr, readers))
                raise ValueError(
                    f'config.{name}={values[name]!r} is read by config.{of}={texts} alone, and it '
                    f'is {values[of]!r}; leave it out, or choose {" or ".join(readers)}'
                )


def _problem(name: str, key: Key, value: Any) -> str:
    """What is wrong with a value; empty if nothing."""
    kind = type(key.default)  # a bool is an int to Python, so types are compared, not instances
    if key.length:
        number, _ = length_of(value) or (-1, '')
        fits = number > 0 if key.least else number >= 0
        least = 'more than 0' if key.least else '0 or more'
        allowed = f"'500 steps', '2 epochs', '10%' of the run, or a number of epochs, {least}"
        return '' if fits else f'is no length of training; give {allowed}'
    if kind is bool:
        return '' if type(value) is bool else 'is not True or False'
    if kind is int:
        most = LARGEST.get(name, 2**31 - 1)
        fits = type(value) is int and key.least <= value <= most
        return '' if fits else f'is not a whole number from {key.least} to {most}'
    if kind is float:
        fits = type(value) in (int, float) and key.least <= value < math.inf
        return '' if fits else f'is not a finite number from {key.least}'
    if type(value) is not str:
        return 'is not a text'
    if not key.words or value in key.words or (key.own and ':' in value):
        return ''
    if key.pattern and re.fullmatch(key.pattern, value):
        return ''
    path = f", nor an import path 'package.module:name' of {key.own}" if key.own else ''
    such = f', nor {key.such}' if key.such else ''
    left = LEFT.get((name, value.partition('(')[0]), '')
    return (
        f'is not one of {", ".join(map(repr, key.words))}{hint(value, key.words)}{such}{path}'
        f'{left and f"; {left}"}'
    )


def instead_of(name: str, config: Nested, before: str = '') -> str:
    """What to say of an unknown key, in brackets: what says it now, or the key that it may mean.

    >>> instead_of('warmup_epochs', {})
    " (it has left: config.phases='raw@:N' sends the first N epochs uncompressed)"
    """
    if name in LEFT_KEYS:
        return f' (it has left: {LEFT_KEYS[name][1]})'
    near = nearest(name, config)
    return f' (did you mean {before}{near}?)' if near else ''


def nearest(name: str, config: Nested) -> str:
    """The key of ``config`` that a misspelt ``name`` may mean; empty if none is near.

    A key whose last part is right, in whatever group, is nearer than one of the same group. What a
    key means stands for it, as do the first of its words, and a group for the name in it.

    >>> keys = default().to_dict()
    >>> [nearest(name, keys) for name in ('model.widht', 'data.batch_size', 'learning_rate')]
    ['model.width', 'batch_size', 'optimizer.lr']
    >>> nearest('model.colour', keys)
    ''
    """
    names = list(flat(config))
    last, end = name.rpartition('.')[2], lambda n: n.rpartition('.')[2]
    groups = {n.removesuffix('.name'): n for n in names if n.endswith('.name')}
    if name in groups:
        return groups[name]
    ends = list(dict.fromkeys(map(end, names)))
    meant = [n for n in names if n in KEYS and KEYS[n].line == last.replace('_', ' ')]
    if meant and last not in ends:
        return meant[0]
    near = [last] if last in ends else difflib.get_close_matches(last, ends, 1, ALIKE)
    near = near or [e for e in ends if e.partition('_')[0] == last]
    alike = [n for n in names if end(n) in near] if len(near) == 1 else []
    alike = alike or [groups[g] for g in difflib.get_close_matches(name, groups, 1, ALIKE)]
    likeness = lambda n: difflib.SequenceMatcher(None, name, n).ratio()
    return max(alike, key=likeness, default='')
