"""`settings`: which keys of a configuration decide a run's numbers, and their defaults."""

from __future__ import annotations

from typing import Any

Summary = dict[str, Any]
# Keys that say nothing of a run's numbers: where files lie, what is kept of it.
IDLE = ('checkpoint_every', 'data_dir', 'download', 'init_from', 'tensorboard', 'tokenizer')
DEFAULTS: Summary = {  # what code takes a key for that a configuration lacks
    'clip_norm': 0.0,
    'dropout': 0.0,
    'dtype': 'float32',
    'exchange': 'mean',
    'micro_batches': 1,
    'momentum': 0.0,
    'optimiser': 'sgd',
    'pool': 1,
    'remat': False,
    'replicas': 1,
    'runtime': 'local',
    'test_examples': 0,
    'warmup_epochs': 0,
    'weight_decay': 0.0,
    'tied_exchange': 'mean',
}


def settings(config: Summary) -> Summary:
    """What of ``config`` decides a run's numbers; a key that it lacks counts as its default.

    >>> settings({'lr': 0.1, 'data_dir': 'here'})['exchange']
    'mean'
    """
    return {k: v for k, v in {**DEFAULTS, **config}.items() if k not in IDLE}
