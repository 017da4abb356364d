"""GPT-2 weights in Hugging Face's layout, read from a directory into stages and written back.

Names are those of ``GPT2LMHeadModel`` with or without the prefix ``transformer.``; kernels are
``(in, out)`` in both layouts, so nothing is transposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxmp.data.understood import AGAIN, contents, understood
from jaxmp.models.checkpoint import FILE, IDLE, OFF, Described, open_checkpoint, wanted
from jaxmp.models.gpt2 import Config, Stage
from jaxmp.models.pretrained import compare, dump, save

_HEAD = 'lm_head.weight'  # whose name alone has no prefix
_GELU = ('gelu_new', 'gelu_pytorch_tanh')  # two names of one function


def read_config(directory: str, **changes: Any) -> Config:
    """The sizes and dropout rates in ``config.json``.

    Args:
      directory: folder with ``config.json``.
      **changes: fields of `Config` to replace, for example ``dtype=jnp.bfloat16``.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if the file describes a model other than the published GPT-2.
    """
    file = Path(directory).expanduser() / 'config.json'
    if not file.is_file():
        raise FileNotFoundError(f'no config.json in {directory}; {wanted()}')
    described = contents(file)
    cure = 'give the directory of a GPT-2 as it was published'
    understood(file, {'model_type': None, **described}, _READ, _NEUTRAL, cure)
    _check_numbers(file, described)
    rates = tuple(described.get(k, 0.1) for k in _RATES)
    sizes = {ours: described[theirs] for ours, theirs in _SIZES.items() if theirs in described}
    tied = described.get('tie_word_embeddings', True)
    return dataclasses.replace(Config(dropout=rates, tied=tied, **sizes), **changes)


def _check_numbers(file: Path, described: Described) -> None:
    for key in (k for k in (*_SIZES.values(), *_RATES) if k in described):
        whole = key not in (*_RATES, 'layer_norm_epsilon')
        fits = (
            type(described[key]) in ((int,) if whole else (int, float)) and described[key] >= whole
        )
        if not fits and (key, described[key]) != ('n_inner', None):
            raise ValueError(
                f'{file} has {key}={described[key]!r}, which is not a {"whole " * whole}number '
                f'from {int(whole)}; {AGAIN}'
            )


_SIZES = {
    'vocabulary': 'vocab_size',
    'positions': 'n_positions',
    'width': 'n_embd',
    'blocks': 'n_layer',
    'heads': 'n_head',
    'inner': 'n_inner',
    'epsilon': 'layer_norm_epsilon',
}
_RATES = ('embd_pdrop', 'attn_pdrop', 'resid_pdrop')
_READ = (IDLE - {'model_type'}) | {
    *_SIZES.values(), *_RATES, 'n_ctx', 'predict_special_tokens', 'reorder_and_upcast_attn',
    'summary_activation', 'summary_first_dropout', 'summary_proj_to_labels', 'summary_type',
    'summary_use_proj',
}  # fmt: skip
_NEUTRAL = OFF | {
    'model_type': ('gpt2',), 'activation_function': _GELU, 'scale_attn_weights': (True,),
    'scale_attn_by_inverse_layer_idx': (False,), 'tie_word_embeddings': (True, False),
}  # fmt: skip


def check_vocabulary(config: Config, vocabulary: int) -> None:
    """Raises ValueError unless the tokeniser of the text has as many tokens as the weights.

    Args:
      config: sizes of the model with these weights.
      vocabulary: number of tokens of the text's tokeniser.
    """
    if config.vocabulary != vocabulary:
        raise ValueError(
            f'the weights have a table of {config.vocabulary} tokens and the tokeniser of the text '
            f'has {vocabulary}; use the tokeniser of the weights (usually in the same folder)'
        )


def read(
    directory: str, stages: Sequence[Stage], only: int | None = None
) -> tuple[dict[str, PyTree], ...]:
    """Variables of the stages, from the files in a directory.

    Args:
      directory: folder in Hugging Face's layout.
      stages: of `gpt2` with its config.
      only: number of the only stage to read, which gives a tuple of one; None reads all.

    Returns:
      One ``{'params': ...}`` per stage, float32; the first and the last stage both have ``wte``, or
      the last one ``lm_head``.

    Raises:
      FileNotFoundError: if there are no weights.
      ValueError: if a file is damaged, or has other tensors than this model.
    """
    tensors = _tensors(Path(directory))
    if stages[0].config.tied:
        head, wte = tensors.pop(_HEAD, None), tensors.get('wte.weight')
        if head is not None and wte is not None and not np.array_equal(head, wte):
            raise ValueError(
                f'{directory}: lm_head.weight differs from wte.weight, and by its config.json they '
                'are tied; set tie_word_embeddings to false there'
            )
    names = _names(stages)
    needed = {n: s for stage in names for _, n, s in stage}
    if needed.keys() - tensors == {_HEAD}:
        raise ValueError(
            f'{directory} has no {_HEAD}, and by its config.json the output layer has a table of '
            'its own; set tie_word_embeddings to true there if they are one'
        )
    compare(directory, {n: a.shape for n, a in tensors.items()}, needed)
    chosen = names if only is None else [names[only]]
    flat = ({p: jnp.asarray(tensors[n], jnp.float32) for p, n, _ in stage} for stage in chosen)
    return tuple({'params': unflatten_dict(params)} for params in flat)


def write(
    directory: str, stages: Sequence[Stage], variables: Sequence[Mapping[str, PyTree]]
) -> None:
    """Writes ``config.json`` and ``model.safetensors``, which transformers loads.

    Args:
      directory: target folder; it is created if it does not exist.
      stages: all stages of the model.
      variables: one ``{'params': ...}`` per stage.

    Raises:
      ValueError: if the token tables of the first and the last stage of a tied model differ.
      OSError: if the files cannot be written.
    """
    first, last = (np.asarray(variables[s]['params'].get('wte')) for s in (0, -1))
    if stages[0].config.tied and not np.array_equal(first, last):
        raise ValueError(
            'the first and the last stage have different tables wte, and the format has one; '
            'make them equal at the start (TiedParameter.share) and at each step (add)'
        )
    tensors = {}
    for stage, collections in zip(_names(stages), variables, strict=True):
        flat = flatten_dict(collections['params'])
        for path, name, _ in stage:
            full = name if name == _HEAD else f'transformer.{name}'
            tensors[full] = np.ascontiguousarray(flat[path], np.float32)
    (root := Path(directory).expanduser()).mkdir(parents=True, exist_ok=True)
    save(tensors, root / FILE)
    dump(_described(stages[0].config), root / 'config.json')


def _described(c: Config) -> Described:
    end = c.vocabulary - 1 if c.vocabulary == Config().vocabulary else None
    return {
        'architectures': ['GPT2LMHeadModel'],
        'model_type': 'gpt2',
        'activation_function': _GELU[0],
        **{theirs: getattr(c, ours) for ours, theirs in _SIZES.items()},
        **dict(zip(_RATES, c.dropout, strict=True)),
        'bos_token_id': end,
        'eos_token_id': end,
        'tie_word_embeddings': c.tied,
        'dtype': 'float32',
    }


_Named = list[tuple[tuple[str, ...], str, tuple[int, ...]]]  # path, name in a file, shape


def _names(stages: Sequence[Stage]) -> list[_Named]:
    """The parameters of each stage, with their names in a file."""
    names, start = [], 0
    for stage in stages:
        c = stage.config
        x = jnp.zeros((1, 1), jnp.int32) if stage.embeds else jnp.zeros((1, 1, c.width))
        shapes = jax.eval_shape(stage.init, jax.random.key(0), x)['params']
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        paths = [(tuple(k.key for k in path), leaf.shape) for path, leaf in leaves]
        names.append([(path, _name(path, start), shape) for path, shape in paths])
        start += stage.blocks
    return names


def _name(path: tuple[str, ...], start: int) -> str:
    """The name in a file of a parameter of a stage whose first block has number ``start``."""
    words = list(path)
    if words[0].startswith('h_'):
        words[0] = f'h.{start + int(words[0][2:])}'
    if words[-1] in ('kernel', 'scale'):
        words[-1] = 'weight'
    elif words[-1] != 'bias':
        words.append('weight')
    return '.'.join(words)


def _tensors(root: Path) -> dict[str, np.ndarray]:
    """All tensors by name without ``transformer.``; causal masks in old files are left out."""
    checkpoint = open_checkpoint(root)
    names = {name.removeprefix('transformer.'): name for name in checkpoint.shapes}
    masks = ('.attn.bias', '.attn.masked_bias')
    return {k: checkpoint.read(name) for k, name in names.items() if not k.endswith(masks)}
