"""The task of a checkpoint: text, its own tokenizer, and stages that are read instead of drawn."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jaxmp.boundary.pipeline import Variables
from jaxmp.config import Config
from jaxmp.metrics import PERPLEXITY
from jaxmp.models import decoder, gpt2_file, pretrained
from jaxmp.models.adapters import base_of, digest, open_with_adapters, write_adapters
from jaxmp.models.blocks import Blocks
from jaxmp.models.decoder_config import Stored
from jaxmp.models.described import Checkpoint
from jaxmp.training.tasks import trained
from jaxmp.training.tasks.datasets import text_of
from jaxmp.training.tasks.gpt2 import gpt2_task
from jaxmp.training.tasks.task import Collections, Task, cuts_of, is_traced

IN_FILE = 'file'  # the word of model.param_dtype for the blocks of a GGUF file
_TOKENIZERS = ('tokenizer.json', 'vocab.json')


def task_of_checkpoint(config: Config) -> Task:
    """The task of ``config.model.path``, of whatever family the checkpoint is.

    Raises:
      FileNotFoundError: if there is no checkpoint.
      ConnectionError: if it has to be downloaded and cannot be.
      ValueError: if it is damaged, of an unknown family, or does not fit the configuration.
    """
    c = config.model
    if not c.path:
        raise ValueError(
            "config.model.name='pretrained' needs config.model.path: a folder in Hugging Face's "
            'layout, a GGUF file, or owner/name of the hub'
        )
    choice = trained.trained(c.train)
    checkpoint = open_with_adapters(c.path, choice.lora)
    config = _with_tokenizer(config, checkpoint.place)
    if gpt2_file.is_gpt2(checkpoint):
        return gpt2_task(config, text_of(config), checkpoint)
    return _decoder_task(config, checkpoint, choice)


def _decoder_task(config: Config, checkpoint: Checkpoint, choice: trained.Trained) -> Task:
    """The task of a decoder on text, some of whose parameters are trained."""
    c = config.model
    stages: Any = pretrained.stages_of(  # of a decoder
        checkpoint, c.stages, cuts_of(c.cuts), remat=c.remat, lora=choice.lora,
        dtype=None if c.dtype == 'float32' else jnp.dtype(c.dtype),
        stored=_stored(c.param_dtype, choice, checkpoint),
    )  # fmt: skip
    sizes = stages[0].config
    positions = checkpoint.described.get('max_position_embeddings') or 0
    length = config.data.sequence_length
    pretrained.check_length(length, positions, 'config.data.sequence_length', checkpoint.place)
    paths = [(s, p) for s, stage in enumerate(stages) for p in pretrained.shapes(stage)]
    trained.check(c.train, choice, paths)
    in_blocks = [(s, p) for s, p in paths if pretrained.kinds_of(stages[s], p)]
    _check_frozen(c.train, [p for s, p in in_blocks if choice.select(s, p)])
    dataset = text_of(config)
    pretrained.check_tokenizer(
        checkpoint.place, sizes.vocabulary, dataset.classes, 'config.data.tokenizer'
    )

    base = base_of(c.path)
    digest_of_base = functools.cache(functools.partial(digest, base))

    def export(folder: str, variables: Variables) -> None:
        root = Path(folder)
        if choice.lora and not c.merge:
            write_adapters(root, base, stages, variables, digest_of_base())
        else:
            pretrained.write(root, checkpoint.described, stages, variables)
        if dataset.tokenizer:
            dataset.tokenizer.save(root)
        pretrained.copy_companions(checkpoint.place, root)

    def dtype(path: trained.Path) -> DTypeLike:
        wide = path[-1] in pretrained.LOW_RANK or c.param_dtype in ('', IN_FILE)
        return jnp.float32 if wide else jnp.dtype(c.param_dtype)

    # The stages of one process have one table, unless a step donates it and returns two.
    table = None if choice.select(0, decoder.TABLE.path) else {}

    def read(stage: int, key: Array) -> Collections:
        if choice.lora:
            digest_of_base()  # of the files as they are read, which may be replaced later
        stage_key = jax.random.fold_in(key, stage)  # all draw their low-rank updates apart
        return pretrained.read(checkpoint, stages, stage, stage_key, dtype, table)

    def start(stage: int, variables: Collections, key: Array) -> Collections:
        if not is_traced(variables):
            return {**variables, **read(stage, key)}
        leaves: dict[trained.Path, PyTree] = flatten_dict(variables['params'])
        params = {p: a if isinstance(a, Blocks) else a.astype(dtype(p)) for p, a in leaves.items()}
        return {**variables, 'params': unflatten_dict(params)}

    tied = decoder.TABLE if sizes.tied and len(stages) > 1 else None
    return Task(
        dataset, stages, lambda x, key: jnp.asarray(x, jnp.int32), score, PERPLEXITY,
        read=read, start=start, tied=tied, export=export,
        trained=choice.select,
    )  # fmt: skip


def _stored(dtype: str, choice: trained.Trained, checkpoint: Checkpoint) -> Stored:
    """The kernels that stay in their file's blocks: where adapters are trained, or if said so."""
    if dtype == IN_FILE:
        return pretrained.stored(checkpoint)
    if not dtype and choice.lora and checkpoint.kinds:
        with contextlib.suppress(ValueError):  # of a kind that is not known: it is widened
            return pretrained.stored(checkpoint)
    return ()


def _check_frozen(text: str, paths: Sequence[trained.Path]) -> None:
    """Raises ValueError if parameters are trained that are in the blocks of a file."""
    if paths:
        raise ValueError(
            f'config.model.param_dtype={IN_FILE!r} keeps {".".join(paths[0])} in the blocks of its '
            f'file, and config.model.train={text!r} trains it; take '
            "config.model.train='lora(8)', or config.model.param_dtype='bfloat16'"
        )


def score(by_token: Float[Array, 'B T 2'], y: Int[Array, 'B T']) -> dict[str, Array]:
    """Means over the predicted tokens of each sequence; where ``y`` is -1 there is no loss.

    Args:
      by_token: output of a stage with ``by_token``: nats, and whether the token is the likeliest.
      y: the tokens, or -1.
    """
    counted = (y[:, 1:] >= 0).astype(by_token.dtype)
    means = jnp.einsum('btk,bt->kb', by_token[:, :-1], counted) / jnp.maximum(1, counted.sum(1))
    return {'loss': means[0], 'accuracy': means[1]}


def _with_tokenizer(config: Config, place: Path) -> Config:
    """The configuration with the checkpoint's tokenizer, if none is named and it has one."""
    has_one = place.is_file() or any((place / name).is_file() for name in _TOKENIZERS)
    if config.data.tokenizer != 'bytes' or not has_one:
        return config
    copy = config.copy_and_resolve_references().unlock()
    copy.data.tokenizer = str(place)
    return copy.lock()
