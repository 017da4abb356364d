"""`task_of`: the task that a configuration names, of the package or one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxmp import models
from jaxmp.boundary.pipeline import Stage
from jaxmp.config import KEYS, Config
from jaxmp.metrics import METRICS, own
from jaxmp.models.checkpoint import open_checkpoint
from jaxmp.models.huggingface import local
from jaxmp.plugins import called, imported
from jaxmp.training.tasks.datasets import dataset_of, text_of
from jaxmp.training.tasks.gpt2 import gpt2_task
from jaxmp.training.tasks.pretrained import task_of_checkpoint
from jaxmp.training.tasks.task import Task, classifier, cuts_of, entered, measured, reader


def task_of(config: Config) -> Task:
    """The task that ``config.model.name`` and ``config.data.name`` name.

    Raises:
      ValueError: for a value that is not allowed, or an import path to an object of a wrong type;
        the message names the key.
    """
    task = _task(config)
    if config.model.entrance:
        task = entered(task)
    name = config.metric
    if ':' in name:
        wanted = KEYS['metric'].own
        metric = own(imported('metric', name, wanted), name.rpartition(':')[2])
        task = measured(task, metric)
    elif name:
        task = task._replace(metric=METRICS[name])
    if (score := task.metric.score) not in task.scores:
        raise ValueError(
            f'the metric {task.metric.name} is a mean of the score {score!r}, and the task has '
            f'{", ".join(task.scores)}; take one of them, or give the metric its `of`'
        )
    return task


def _task(config: Config) -> Task:
    name = config.model.name
    if name == 'gpt2':
        path = config.model.path
        return gpt2_task(config, text_of(config), open_checkpoint(local(path)) if path else None)
    if name == 'pretrained':
        return task_of_checkpoint(config)
    dataset = dataset_of(config)
    if ':' not in name:
        if dataset.tokenizer:
            raise ValueError(
                f'config.model.name={name!r} is for images, and {dataset.name} is a text; take '
                'gpt2, or a model of your own'
            )
        return classifier(config, dataset, MODELS[name](dataset.classes, config.model))
    wanted = KEYS['model.name'].own
    result = called('model.name', name, wanted, config, dataset)
    if isinstance(result, Task):
        return result
    stages = checked(result, name)
    return reader(dataset, stages) if dataset.tokenizer else classifier(config, dataset, stages)


def checked(stages: object, name: str) -> tuple[Stage, ...]:
    """``stages`` as a tuple.

    Raises:
      ValueError: if they are not a sequence of Flax modules.
    """
    if isinstance(stages, Sequence) and stages and all(isinstance(s, Stage) for s in stages):
        return tuple(stages)
    raise ValueError(
        f'config.model.name={name!r} returned {type(stages).__name__}; it must be '
        f'{KEYS["model.name"].own}, and a stage is a Flax module: a Linen module with '
        '__call__(x, train), or jaxmp.nnx.stage(Module, ...)'
    )


MODELS: dict[str, Callable[[int, Config], Sequence[Stage]]] = {
    'resnet18': lambda classes, model: models.resnet18(classes, model.width, model.norm),
    'lenet': lambda classes, model: models.lenet(classes, model.width),
}


def stage_count(config: Config) -> int:
    """The number of stages of the model; for the package's own models without loading data."""
    name = config.model.name
    if name in ('gpt2', 'pretrained'):
        cuts = cuts_of(config.model.cuts)
        return len(cuts) + 1 if cuts else config.model.stages
    if name in MODELS:
        return len(MODELS[name](1, config.model))
    return len(task_of(config).stages)
