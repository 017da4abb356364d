"""jaxmp: compress what the stages of a model-parallel network send each other."""

import os
from typing import TYPE_CHECKING, Any

# For each program that it finds compiled jax 0.10.1 logs, in 2 kB, that this machine differs from
# itself and may crash. Errors come as exceptions all the same. 1 is what jax sets, also for the
# processes that another one starts.
if os.environ.get('TF_CPP_MIN_LOG_LEVEL', '1') == '1':
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'  # read when jax is imported

from jaxmp import codecs
from jaxmp.boundary import Boundary, FeedbackState, boundary, init_feedback, value_and_grad
from jaxmp.boundary.pipeline import Pipeline, pipeline
from jaxmp.codecs import *  # noqa: F403
from jaxmp.feedback import (
    Channel,
    anchored,
    aqsgd,
    direct,
    ef,
    ef21,
    ef_mixed,
    klt,
    outliers,
    warm,
)
from jaxmp.metrics import Metric
from jaxmp.spec import SpecError, canonical, parse
from jaxmp.wire import Codec, Ctx, Like, bits, like, nbytes

if TYPE_CHECKING:
    from jaxmp.contrib.adaptive import adaptive
    from jaxmp.contrib.dct import dct
    from jaxmp.contrib.k_means import k_means
    from jaxmp.training.loop import train_and_evaluate
    from jaxmp.training.tasks.task import Task

__version__ = '0.2.0'

_LATER = {
    'Task': 'jaxmp.training.tasks.task',
    'train_and_evaluate': 'jaxmp.training.loop',
    **{name: f'jaxmp.contrib.{name}' for name in ('adaptive', 'dct', 'k_means')},
}


def __getattr__(name: str) -> Any:
    """Names of the trainer and of `jaxmp.contrib`, imported when they are first used."""
    if name not in _LATER:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)


__all__ = [
    'Boundary',
    'Channel',
    'Codec',
    'Ctx',
    'FeedbackState',
    'Like',
    'Metric',
    'Pipeline',
    'SpecError',
    'Task',
    'adaptive',
    'anchored',
    'aqsgd',
    'bits',
    'boundary',
    'canonical',
    'dct',
    'direct',
    'ef',
    'ef21',
    'ef_mixed',
    'init_feedback',
    'k_means',
    'klt',
    'like',
    'nbytes',
    'outliers',
    'parse',
    'pipeline',
    'train_and_evaluate',
    'value_and_grad',
    'warm',
]
__all__ += codecs.__all__
