"""GPT-2 in Hugging Face's layout: its config.json, the names of its tensors, and a folder of both.

Names are those of ``GPT2LMHeadModel`` with or without the prefix ``transformer.``; kernels are
``(in, out)`` in both layouts, so nothing is transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxmp.data.understood import AGAIN, understood
from jaxmp.models.described import IDLE, OFF, Checkpoint, Described
from jaxmp.models.gpt2 import Config, Stage
from jaxmp.models.safetensors_file import FILE, dump, save

_HEAD = 'lm_head.weight'  # whose name alone has no prefix
_GELU = ('gelu_new', 'gelu_pytorch_tanh')  # two names of one function


def is_gpt2(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint says that it is one."""
    return checkpoint.described.get('model_type') == 'gpt2'


def config_of(described: Described, file: Path) -> Config:
    """The sizes and dropout rates that a ``config.json`` describes; ``file`` is for messages.

    Raises:
      ValueError: if it describes a model other than the published GPT-2.
    """
    cure = 'give the directory of a GPT-2 as it was published'
    understood(file, {'model_type': None, **described}, _READ, _NEUTRAL, cure)
    _check_numbers(file, described)
    rates = tuple(described.get(k, 0.1) for k in _RATES)
    sizes = {ours: described[theirs] for ours, theirs in _SIZES.items() if theirs in described}
    return Config(dropout=rates, tied=described.get('tie_word_embeddings', True), **sizes)


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


def renamed(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint by names without ``transformer.``, and without causal masks of old files."""
    masks = ('.attn.bias', '.attn.masked_bias')
    names = {n.removeprefix('transformer.'): n for n in checkpoint.shapes if not n.endswith(masks)}
    shapes = {ours: checkpoint.shapes[theirs] for ours, theirs in names.items()}
    return checkpoint._replace(shapes=shapes, read=lambda name: checkpoint.read(names[name]))


def check_head(checkpoint: Checkpoint, tied: bool) -> None:
    """Raises ValueError unless the output layer is tied, or not, as ``config.json`` says."""
    place, names, read = checkpoint.place, checkpoint.shapes, checkpoint.read
    if not tied and _HEAD not in names:
        raise ValueError(
            f'{place} has no {_HEAD}, and by its config.json the output layer has a table of '
            'its own; set tie_word_embeddings to true there if they are one'
        )
    tables = (_HEAD, 'wte.weight')
    head, table = tables
    if tied and names.keys() >= {*tables} and not np.array_equal(read(head), read(table)):
        raise ValueError(
            f'{place}: lm_head.weight differs from wte.weight, and by its config.json they '
            'are tied; set tie_word_embeddings to false there'
        )


def write(
    directory: str, stages: Sequence[Stage], variables: Sequence[Mapping[str, PyTree]]
) -> None:
    """Writes ``config.json`` and ``model.safetensors``, which transformers loads.

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
    tensors, start = {}, 0
    for stage, collections in zip(stages, variables, strict=True):
        for path, leaf in flatten_dict(collections['params']).items():
            name = name_of(path, start)
            full = name if name == _HEAD else f'transformer.{name}'
            tensors[full] = np.ascontiguousarray(leaf, np.float32)
        start += stage.blocks
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


def name_of(path: tuple[str, ...], start: int) -> str:
    """The name in a file of a parameter of a stage whose first block has number ``start``."""
    words = list(path)
    if words[0].startswith('h_'):
        words[0] = f'h.{start + int(words[0][2:])}'
    if words[-1] in ('kernel', 'scale'):
        words[-1] = 'weight'
    elif words[-1] != 'bias':
        words.append('weight')
    return '.'.join(words)
