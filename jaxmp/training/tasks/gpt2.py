"""The task of a GPT-2 on text, with random initial parameters or those of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.boundary.pipeline import Variables
from jaxmp.config import Config
from jaxmp.data import Dataset
from jaxmp.models import gpt2, gpt2_file, pretrained
from jaxmp.models.described import Checkpoint
from jaxmp.models.tied import WTE, table
from jaxmp.training.tasks.task import Collections, Task, cuts_of, reader


def gpt2_task(config: Config, dataset: Dataset, checkpoint: Checkpoint | None = None) -> Task:
    """The task of a GPT-2 on text.

    Args:
      config: configuration of the stages; of a GPT-2 without weights its sizes too.
      dataset: the text.
      checkpoint: its weights; None draws them.

    Raises:
      ValueError: if the weights are damaged, or do not fit the configuration.
    """
    c = config.model
    sizes = _sizes(config, dataset.classes, checkpoint)
    stages = gpt2.gpt2(sizes, c.stages, cuts_of(c.cuts))
    if checkpoint:
        pretrained.check(checkpoint, stages)

    def start(stage: int, variables: Collections, key: Array) -> Collections:
        if not checkpoint:
            return _drawn(stages, stage, variables, key)
        params = pretrained.read(checkpoint, stages, stage)['params']
        return {**variables, 'params': {**variables.get('params', {}), **params}}

    def export(folder: str, variables: Variables) -> None:
        gpt2_file.write(folder, stages, variables)
        assert dataset.tokenizer, 'a text has one'
        dataset.tokenizer.save(Path(folder))

    tied = WTE if sizes.tied and len(stages) > 1 else None
    return reader(dataset, stages)._replace(start=start, tied=tied, export=export)


def _sizes(config: Config, tokens: int, checkpoint: Checkpoint | None) -> gpt2.Config:
    """The sizes of the network, by the checkpoint if there is one, else by the configuration."""
    c, dropout = config.model, (config.model.dropout,) * 3
    dtype = None if c.dtype == 'float32' else jnp.dtype(c.dtype)
    if not checkpoint:
        return gpt2.Config(
            tokens, config.data.sequence_length, c.width, c.blocks, c.heads, dropout=dropout,
            tied=c.tied, dtype=dtype, remat=c.remat,
        )  # fmt: skip
    sizes = gpt2_file.config_of(checkpoint.described, checkpoint.place / 'config.json')
    if sizes.vocabulary != tokens:
        raise ValueError(
            f'the weights have a table of {sizes.vocabulary} tokens and the tokeniser of the text '
            f'has {tokens}; use the tokeniser of the weights (usually in the same folder)'
        )
    if sizes.tied and not c.tied:
        raise ValueError(
            f'config.model.tied=False, and the weights in {c.path} have one table to embed and '
            'to score; leave it out, or put lm_head.weight into the weights and '
            'tie_word_embeddings=false into their config.json'
        )
    return dataclasses.replace(sizes, dropout=dropout, dtype=dtype, remat=c.remat)


def _drawn(
    stages: Sequence[gpt2.Stage], stage: int, variables: Collections, key: Array
) -> Collections:
    """Random variables, in which the last stage has the table of the first."""
    if not stages[0].config.tied or stage not in (0, len(stages) - 1):
        return variables
    first = table(stages[0], jax.random.fold_in(key, 0))
    return {**variables, 'params': WTE.put(variables['params'], first)}
