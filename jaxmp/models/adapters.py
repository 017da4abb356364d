"""Low-rank updates in a folder of their own, in PEFT's layout: written, read, and merged.

``adapter_config.json`` names the model that they belong to; ``adapter_model.safetensors`` has A and
B of each kernel.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxmp.data import documents
from jaxmp.data.understood import AGAIN, contents, keys, understood
from jaxmp.models.checkpoint import open_checkpoint
from jaxmp.models.decoder import Lora, Stage
from jaxmp.models.described import Checkpoint
from jaxmp.models.families import FAMILIES
from jaxmp.models.huggingface import local
from jaxmp.models.pretrained import LOW_RANK, Keys, Params, tensors_of
from jaxmp.models.safetensors_file import dump, notes, open_tensors, save

FILE = 'adapter_model.safetensors'
ABOUT = 'adapter_config.json'
BASE = 'digest_of_base'  # a note in `FILE`, which PEFT does not read
_PREFIX = 'base_model.model.'
_MERGE = 'merge them with PEFT (merge_and_unload)'
_PATTERN = r'(.*\.)?({})$'  # the end of a module's name, in whole words
_READ = keys(  # and what says which kernels have tensors, or how training began
    """base_model_name_or_path lora_alpha r use_rslora alpha_pattern rank_pattern
    auto_mapping eva_config exclude_modules inference_mode layers_pattern layers_to_transform
    lora_dropout megatron_core peft_version qalora_group_size runtime_config target_modules
    task_type"""
)
_NEUTRAL = {
    'peft_type': ('LORA',),
    'bias': ('none', None), 'ensure_weight_tying': (False, None), 'fan_in_fan_out': (False, None),
    # other ways to begin change the base too
    'init_lora_weights': (True, False, 'gaussian', 'eva', None), 'loftq_config': ({}, None),
    'lora_bias': (False, None), 'merge_weights': (False, None), 'modules_to_save': ([], None),
    'revision': ('main', '', None), 'target_parameters': ([], None), 'use_dora': (False, None),
    'use_qalora': (False, None), 'trainable_token_indices': ([], None),
}  # fmt: skip


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
    understood(place / ABOUT, {'peft_type': None, **about}, _READ, _NEUTRAL, _MERGE)
    _check_patterns(place / ABOUT, about)
    if not (place / FILE).is_file():
        raise FileNotFoundError(f'{place} has {ABOUT} and no {FILE}; {AGAIN}')
    whose = str(about.get('base_model_name_or_path'))
    base = _base(place, whose)
    shapes, read = open_tensors([place / FILE])
    names = {_ours(place, name): name for name in shapes}
    shapes_of = {ours: shapes[theirs] for ours, theirs in names.items()}
    updates = {
        module: _update(place, about, base, module, shapes_of)
        for module in sorted({n.rpartition('.')[0] for n in names})
    }
    if (trained_on := notes(place / FILE).get(BASE)) and trained_on != (now := digest(whose)):
        raise ValueError(
            f'{place} has adapters that were trained on other weights than those in {base.place} '
            f'({BASE} {trained_on}, now {now}); put the path of theirs into '
            f'base_model_name_or_path of {ABOUT}'
        )
    low = lambda name: read(names[name])
    # Trained on, the updates are parameters of their own; else W + scale B A takes W's place.
    if lora:
        _check_same(place, updates.values(), lora)
        return base._replace(
            shapes={**base.shapes, **shapes_of},
            read=lambda name: low(name) if name in names else base.read(name),
        )

    def merged(name: str) -> np.ndarray:
        kernel, module = base.read(name), name.removesuffix('.weight')
        if not (update := updates.get(module)):
            return kernel
        a, b = (low(f'{module}.{part}').astype(np.float32) for part in LOW_RANK)
        # In float32 whatever the file has, so that the reader's dtype rounds once.
        return kernel.astype(np.float32) + np.float32(update.alpha / update.rank) * (b @ a)

    return base._replace(read=merged, kinds={})


def _base(place: Path, name: str) -> Checkpoint:
    """The model that the adapters of a folder belong to."""
    try:
        base = open_checkpoint(local(name))
    except (FileNotFoundError, ConnectionError) as error:
        raise type(error)(
            f'{place / ABOUT} says that its adapters belong to {name!r}, which is not there; '
            f'put its path or name into base_model_name_or_path ({error})'
        ) from error
    if (family := base.described.get('model_type')) not in FAMILIES:
        raise ValueError(f'{place} has adapters of a {family}, which are not read; {_MERGE}')
    return base


def _check_patterns(file: Path, about: Mapping[str, Any]) -> None:
    """Raises ValueError unless the patterns are regular expressions and what they stand for."""
    for key in ('rank_pattern', 'alpha_pattern'):
        rows = about.get(key)
        try:
            for pattern in {} if rows is None else rows.keys():
                re.compile(_PATTERN.format(pattern))
        except (re.error, AttributeError) as error:
            raise ValueError(
                f'{file} has {key}={rows!r} ({error}); allowed is a dict of regular expressions: '
                f'{AGAIN}'
            ) from error


def _update(
    place: Path, about: Mapping[str, Any], base: Checkpoint, module: str, shapes: Mapping
) -> Lora:
    """The update of a module, by the first pattern that matches the end of its name."""

    def value(key: str, patterns: str) -> Any:
        rows = (about.get(patterns) or {}).items()
        matching = (v for pattern, v in rows if re.match(_PATTERN.format(pattern), module))
        return next(matching, about.get(key))

    rank, alpha = value('r', 'rank_pattern'), value('lora_alpha', 'alpha_pattern')
    is_number = type(alpha) in (int, float) and abs(alpha) < 1e30  # float32's
    if type(rank) is not int or rank < 1 or not is_number:
        raise ValueError(
            f'{place / ABOUT} has r={rank!r} and lora_alpha={alpha!r} for {module}; allowed are a '
            f'whole number from 1 and a finite number: {AGAIN}'
        )
    kernel = base.shapes.get(f'{module}.weight', ())
    said = {**FAMILIES[base.described['model_type']].defaults, **base.described}
    if len(kernel) != 2 or (module == 'lm_head' and said.get('tie_word_embeddings')):
        raise ValueError(f'{place} has adapters of {module}, which {base.place} lacks; {_MERGE}')
    came = [shapes.get(f'{module}.{part}') for part in LOW_RANK]
    if came != (wanted := [(rank, kernel[1]), (kernel[0], rank)]):
        raise ValueError(
            f'{place} has adapters of {module} of the shapes {came}, and by {ABOUT} and '
            f'{base.place} they are {wanted}; {AGAIN}'
        )
    alpha *= math.sqrt(rank) if about.get('use_rslora') else 1  # PEFT's alpha / sqrt(rank)
    return Lora(rank, alpha, (module.rpartition('.')[2],))


def _check_same(place: Path, updates: Collection[Lora], lora: Lora) -> None:
    """Raises ValueError unless the updates are those that are to be trained."""
    targets = {target for update in updates for target in update.targets}
    kinds = sorted({(update.rank, update.alpha) for update in updates})
    if kinds != [(lora.rank, lora.alpha)] or targets != {*lora.targets}:
        end = f", targets='{' '.join(sorted(targets))}')"
        raise ValueError(
            f'{place} has adapters {" and ".join(f"lora({r}, {a:g}{end}" for r, a in kinds)}; '
            'train the same, or all of the parameters, which merges the adapters'
        )


def files_of(path: str) -> list[Path]:
    """The files from which a checkpoint's parameters come: tensors and their description."""
    place = local(path)
    if place.is_file():
        return [place]
    names = {'config.json', ABOUT}
    files = sorted(f for f in place.iterdir() if f.suffix == '.safetensors' or f.name in names)
    return files + (files_of(base_of(str(place))) if place / ABOUT in files else [])


def digest(path: str) -> str:
    """Of the content of a checkpoint's files, as 16 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=8)
    for file in files_of(path):
        hashed.update(f'{file.name} {documents.digest(file)} '.encode())
    return hashed.hexdigest()


def base_of(path: str) -> str:
    """The model that adapters of a run on ``path`` belong to, as it was given.

    Of a folder of adapters it is the one that they name. The name in a checkpoint's config.json is
    not used: fine-tuned weights often have that of the model before.
    """
    about = Path(path).expanduser() / ABOUT
    return str(contents(about)['base_model_name_or_path']) if about.is_file() else path


def write_adapters(
    folder: str | Path,
    base: str,
    stages: Sequence[Stage],
    variables: Sequence[Mapping[str, Params]],
    trained_on: str,
) -> None:
    """Writes the low-rank updates alone, as PEFT does, to ``base``, whose `digest` is the last."""
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


def _ours(place: Path, name: str) -> str:
    """Inverse of `_theirs`."""
    parts = re.fullmatch(rf'{re.escape(_PREFIX)}(.+)\.lora_([AB])(\.default)?\.weight', name)
    if not parts:
        raise ValueError(
            f'{place / FILE} has {name}; allowed are lora_A.weight and lora_B.weight of kernels: '
            f'{_MERGE}'
        )
    return f'{parts[1]}.lora_{parts[2].lower()}'
