"""Low-rank updates in a folder of their own, in PEFT's layout: written, read, and merged.

``adapter_config.json`` names the model that they belong to; ``adapter_model.safetensors`` has A and
B of each kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxmp.data import documents
from jaxmp.models.checkpoint import (
    AGAIN,
    Checkpoint,
    contents,
    notes,
    open_checkpoint,
    open_tensors,
)  # fmt: skip
from jaxmp.models.decoder import Lora, Stage
from jaxmp.models.huggingface import local
from jaxmp.models.pretrained import LOW_RANK, Keys, Params, dump, save, tensors_of

FILE = 'adapter_model.safetensors'
ABOUT = 'adapter_config.json'
BASE = 'digest_of_base'  # a note in `FILE`, which PEFT does not read
_PREFIX = 'base_model.model.'


def open_with_adapters(path: str, lora: Lora | None = None) -> Checkpoint:
    """The checkpoint of a path; of a folder of adapters their base with them.

    Args:
      path: a folder, a GGUF file or a name of the hub.
      lora: low-rank updates of the stages that will read it, which the adapters must be; None
        merges the adapters into their kernels.

    Raises:
      FileNotFoundError: as `jaxmp.models.checkpoint.open_checkpoint`.
      ValueError: if the adapters are not LoRA, not these, or belong to another model.
    """
    place = local(path)
    if not (place / ABOUT).is_file():
        return open_checkpoint(place)
    about = contents(place / ABOUT)
    if about.get('peft_type') != 'LORA' or about.get('use_dora') or about.get('use_rslora'):
        raise ValueError(f'{place} has adapters of another kind than LoRA; merge them with PEFT')
    if not (place / FILE).is_file():
        raise FileNotFoundError(f'{place} has {ABOUT} and no {FILE}; {AGAIN}')
    whose = str(about.get('base_model_name_or_path'))
    try:
        base = open_checkpoint(local(whose))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f'{place / ABOUT} says that its adapters belong to {whose!r}, which is not there; '
            'put its path or name into base_model_name_or_path'
        ) from error
    shapes, read = open_tensors([place / FILE])
    names = {_ours(name): name for name in shapes}
    alone = {n.rpartition('.')[0] for n in names}
    if unknown := sorted(n for n in alone if f'{n}.weight' not in base.shapes):
        raise ValueError(f'{place} has adapters of {unknown[0]}, which {base.place} lacks')
    if (trained_on := notes(place / FILE).get(BASE)) and trained_on != (now := digest(whose)):
        raise ValueError(
            f'{place} has adapters that were trained on other weights than those in {base.place} '
            f'({BASE} {trained_on}, now {now}); put the path of theirs into '
            f'base_model_name_or_path of {ABOUT}'
        )
    shapes_of = {ours: shapes[theirs] for ours, theirs in names.items()}
    low = lambda name: read(names[name])
    targets = {name.rpartition('.')[2] for name in alone}
    rank, alpha = about['r'], about['lora_alpha']
    if lora and (rank, alpha, targets) != (lora.rank, lora.alpha, set(lora.targets)):
        raise ValueError(
            f"{place} has adapters lora({rank}, {alpha}, targets='{' '.join(sorted(targets))}'); "
            'train the same, or all of the parameters, which merges the adapters'
        )
    # Trained on, the updates are parameters of their own; else W + alpha / r B A takes W's place.
    if lora:
        return base._replace(
            shapes={**base.shapes, **shapes_of},
            read=lambda name: low(name) if name in names else base.read(name),
        )

    def merged(name: str) -> np.ndarray:
        kernel, whose = base.read(name), name.removesuffix('.weight')
        if whose not in alone:
            return kernel
        a, b = (low(f'{whose}.{part}').astype(np.float32) for part in LOW_RANK)
        return (kernel + alpha / rank * (b @ a)).astype(kernel.dtype)

    return base._replace(read=merged)


def files_of(path: str) -> list[Path]:
    """The files from which a checkpoint's parameters come: tensors and their description.

    Args:
      path: as of `open_with_adapters`.
    """
    place = local(path)
    if place.is_file():
        return [place]
    names = {'config.json', ABOUT}
    files = sorted(f for f in place.iterdir() if f.suffix == '.safetensors' or f.name in names)
    return files + (files_of(base_of(path)) if place / ABOUT in files else [])


def digest(path: str) -> str:
    """Of the content of a checkpoint's files, as 16 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=8)
    for file in files_of(path):
        hashed.update(f'{file.name} {documents.digest(file)} '.encode())
    return hashed.hexdigest()


def base_of(path: str) -> str:
    """The path or name of the model that adapters of a run on ``path`` belong to."""
    place = Path(path).expanduser()
    if (place / ABOUT).is_file():
        return str(contents(place / ABOUT)['base_model_name_or_path'])
    return str(place.resolve()) if place.exists() else path


def write_adapters(
    folder: str | Path,
    base: str,
    stages: Sequence[Stage],
    variables: Sequence[Mapping[str, Params]],
    trained_on: str,
) -> None:
    """Writes the low-rank updates alone, as PEFT does.

    Args:
      folder: it is created if it does not exist.
      base: path or name of the model that they belong to.
      stages: all stages of the model, with ``config.lora``.
      variables: one ``{'params': ...}`` per stage.
      trained_on: the `digest` of the model.
    """
    (root := Path(folder).expanduser()).mkdir(parents=True, exist_ok=True)
    lora = stages[0].config.lora
    assert lora
    arrays, start = {}, 0
    for stage, collections in zip(stages, variables, strict=True):
        tree: dict[Keys, PyTree] = flatten_dict(collections['params'])
        low = {path: np.asarray(a) for path, a in tree.items() if path[-1] in LOW_RANK}
        arrays |= {_theirs(name): a for name, a in tensors_of(stage, low, start)}
        start += stage.blocks
    save(arrays, root / FILE, **{BASE: trained_on})
    described = {
        'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': base,
        'r': lora.rank, 'lora_alpha': lora.alpha, 'target_modules': list(lora.targets),
        'lora_dropout': 0.0, 'bias': 'none', 'fan_in_fan_out': False, 'inference_mode': True,
    }  # fmt: skip
    dump(described, root / ABOUT)


def _theirs(name: str) -> str:
    """PEFT's name of ``model.layers.0.self_attn.q_proj.lora_a``."""
    kernel, _, part = name.rpartition('.')
    return f'{_PREFIX}{kernel}.lora_{part[-1].upper()}.weight'


def _ours(name: str) -> str:
    """Inverse of `_theirs`."""
    kernel, _, part = name.removeprefix(_PREFIX).removesuffix('.weight').rpartition('.')
    return f'{kernel}.{part.lower()}'
