"""Stages of a pretrained model, whose parameters are read from a `Checkpoint` and written back.

Each stage reads its own tensors and no others. What is written is a folder that transformers loads,
with one file per stage.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from jaxmp.data import release
from jaxmp.models import blocks, decoder, families, gpt2, gpt2_file
from jaxmp.models.blocks import Blocks
from jaxmp.models.decoder_config import Stored
from jaxmp.models.described import Checkpoint, Described
from jaxmp.models.families import FAMILIES
from jaxmp.models.huggingface import COMPANIONS
from jaxmp.models.safetensors_file import FILE, INDEX, dump, save

Keys = tuple[str, ...]  # of a parameter in a stage's
Params = dict[str, PyTree]
Stage = decoder.Stage | gpt2.Stage
Shapes = Mapping[str, tuple[int, ...]]
LOW_RANK = ('lora_a', 'lora_b')
EVERY = -1  # of `stages_of`: each block is a stage
_TABLES = ('embed_tokens', 'wte')  # the token table of a decoder and of a GPT-2


def stages_of(
    checkpoint: Checkpoint, stages: int, cuts: Sequence[int] = (), **changes: Any
) -> tuple[Stage, ...]:
    """The stages of a checkpoint, whose parameters are its tensors; `read` reads them.

    What they send is float32, and the last stage of a decoder gives scores by token.

    Args:
      checkpoint: of a GPT-2 or of a decoder.
      stages: number of stages; `EVERY`: one for each block.
      cuts: numbers of blocks before each boundary, in place of ``stages``.
      **changes: fields of the network's config to replace.

    Raises:
      ValueError: if the family is unknown, or the tensors are not those of its network.
    """
    config = config_of(checkpoint)
    count = config.blocks if stages == EVERY else stages
    if isinstance(config, gpt2.Config):
        parts = gpt2.gpt2(dataclasses.replace(config, **changes), count, cuts)
    else:
        config = dataclasses.replace(config, stream=jnp.float32, **changes)
        parts = decoder.decoder(config, count, cuts, by_token=True)
    check(checkpoint, parts)
    return parts


def config_of(checkpoint: Checkpoint) -> decoder.Config | gpt2.Config:
    """The network that a checkpoint describes.

    Raises:
      ValueError: if it is of an unknown family, or a size is missing or wrong.
    """
    described, place = checkpoint.described, checkpoint.place
    if gpt2_file.is_gpt2(checkpoint):
        return gpt2_file.config_of(described, place / 'config.json')
    return families.config_of(described, str(place))


def read(
    checkpoint: Checkpoint,
    stages: Sequence[Stage],
    only: int,
    key: Array | None = None,
    dtype: Callable[[Keys], DTypeLike | None] = lambda path: np.float32,
    shared: dict[str, Array | Blocks] | None = None,
) -> dict[str, Params]:
    """The variables of one stage, of stages that `check` finds to fit.

    Args:
      checkpoint: of the model.
      stages: all of them, as of `stages_of`.
      only: number of the stage.
      key: of the low-rank updates, which no checkpoint has; not needed without.
      dtype: of the parameter of a path; None means the file's.
      shared: the token table that another stage has read, by name, to which that of this one is
        added: a tied table is then one array. Nobody may donate it.

    Returns:
      ``{'params': ...}``.
    """
    needed, shared = shapes(stages[only]), {} if shared is None else shared
    start = sum(stage.blocks for stage in stages[:only])
    params: dict[Keys, Array | Blocks] = {}
    for path, shape in needed.items():
        names = list(_names(stages[only], path, start))
        if names[0] not in checkpoint.shapes:  # a low-rank update; all others are there
            continue
        kinds = kinds_of(stages[only], path)
        if path[0] != 'layers':
            array = shared.get(names[0])
            if array is None and kinds:
                array = _blocks(checkpoint, path, names, kinds)
            elif array is None:
                array = jnp.asarray(checkpoint.read(names[0]), dtype(path))
            if path[0] in _TABLES:
                shared[names[0]] = array
            params[path] = array
            continue
        if kinds:
            params[path] = _blocks(checkpoint, path, names, kinds)
            continue
        first = checkpoint.read(names[0])
        stack = np.empty(shape, dtype(path) or first.dtype)
        for i, name in enumerate(names):
            stack[i] = checkpoint.read(name) if i else first
        params[path] = jnp.asarray(stack)
    low = {path: shape for path, shape in needed.items() if path not in params}
    return {'params': unflatten_dict(params | _low_rank(low, key))}


def stored(checkpoint: Checkpoint) -> Stored:
    """The kernels and tables of a file with the kinds of their blocks, as a config stores them.

    Those of 32 bits are arrays as they are.

    Raises:
      ValueError: if the file has no blocks, or of a kind that is not known.
    """
    if not checkpoint.kinds:
        raise ValueError(
            f'{checkpoint.place} has no blocks of weights, so its parameters cannot stay as they '
            "are; give a .gguf file, or config.model.param_dtype='bfloat16'"
        )
    kinds: dict[str, set[str]] = {}
    for name, kind in checkpoint.kinds.items():
        if len(checkpoint.shapes[name]) == 2:
            kinds.setdefault(name.split('.')[-2], set()).add(kind)
            if kind not in blocks.KINDS:
                raise ValueError(
                    f'{checkpoint.place}: {name} is in blocks {kind}; {", ".join(blocks.KINDS)} '
                    "may stay as they are: take config.model.param_dtype='bfloat16'"
                )
    return tuple((module, tuple(sorted(k))) for module, k in kinds.items() if k != {'F32'})


def kinds_of(stage: Stage, path: Keys) -> tuple[str, ...]:
    """The kinds of blocks in which a parameter is; none if it is an array."""
    if isinstance(stage, gpt2.Stage) or path[-1] != 'weight':
        return ()
    return dict(stage.config.stored).get(path[-2], ())


def _blocks(
    checkpoint: Checkpoint, path: Keys, names: Sequence[str], kinds: tuple[str, ...]
) -> Blocks:
    """The kernels of a path, which have these names in their file, as they are there."""
    assert checkpoint.read_bytes
    N, K = checkpoint.shapes[names[0]]
    stack = _aligned((len(names), N, max(blocks.row_bytes(kind, K) for kind in kinds)))
    for rows, name in zip(stack, names, strict=True):
        read = checkpoint.read_bytes(name)
        rows[:, read.shape[1] :] = 0
        for i in range(0, N, blocks.PIECE):  # of a file that is mapped few rows are in memory
            rows[i : i + blocks.PIECE, : read.shape[1]] = read[i : i + blocks.PIECE]
            release(read)
    kind = [kinds.index(checkpoint.kinds[name]) for name in names]
    rows = jax.device_put(stack if path[0] == 'layers' else stack[0])
    return Blocks(rows, jnp.array(kind) if kinds[1:] else None, kinds, K)


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Bytes at a multiple of 64, which JAX takes on a CPU without a copy."""
    count = math.prod(shape)
    room = np.empty(count + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + count].reshape(shape)


def _low_rank(shapes: Mapping[Keys, tuple[int, ...]], key: Any) -> dict[Keys, Array]:
    """Low-rank updates as PEFT begins them: A uniform within ``1 / sqrt(in)``, B zero."""
    updates = {}
    for i, (path, shape) in enumerate(sorted(shapes.items())):
        if path[-1] == 'lora_b':
            updates[path] = jnp.zeros(shape)
            continue
        bound = shape[-1] ** -0.5
        updates[path] = jax.random.uniform(
            jax.random.fold_in(key, i), shape, minval=-bound, maxval=bound
        )
    return updates


def check(checkpoint: Checkpoint, stages: Sequence[Stage]) -> None:
    """Raises ValueError if the checkpoint has other tensors than the stages need."""
    place, config = checkpoint.place, stages[0].config
    if isinstance(config, gpt2.Config):
        gpt2_file.check_head(checkpoint, config.tied)
    needed, start = {}, 0
    for stage in stages:
        for path, shape in shapes(stage).items():
            shape = shape[1:] if path[0] == 'layers' else shape
            names = list(_names(stage, path, start))
            if path[-1] not in LOW_RANK or names[0] in checkpoint.shapes:
                needed |= dict.fromkeys(names, shape)
        start += stage.blocks
    idle = ('.rotary_emb.inv_freq', *(['lm_head.weight'] if config.tied else []))
    came = {
        n: shape for n, shape in checkpoint.shapes.items() if n in needed or not n.endswith(idle)
    }
    missing, extra = sorted(needed.keys() - came), sorted(came.keys() - needed)
    if missing or extra:
        raise ValueError(
            f'{place} has other tensors than its config.json says: {len(missing)} missing '
            f'{_some(missing)}, {len(extra)} unknown {_some(extra)}; download it again'
        )
    for name, shape in needed.items():
        if came[name] != shape:
            raise ValueError(
                f'{place}: {name} has shape {came[name]}, and its config.json says {shape}; '
                'download it again'
            )


def check_tokenizer(place: Path, rows: int, tokens: int, key: str) -> None:
    """Raises ValueError if a tokenizer, which ``key`` names, is of another checkpoint."""
    if rows / 2 <= tokens <= rows:  # some checkpoints leave a few rows unused
        return
    raise ValueError(
        f'the table of {place} has {rows:,} tokens and the tokenizer {tokens:,}, so it is of '
        f"another model; leave {key} out, which takes the checkpoint's own, or give the folder "
        'with tokenizer.json, or the GGUF file, of this model'
    )


def check_length(tokens: int, positions: int, key: str, name: object) -> None:
    """Raises ValueError if sequences are longer than those that a model was made for."""
    if positions and tokens > positions:
        raise ValueError(f'{key}={tokens} is more than the {positions} positions of {name}')


def _flat(tree: PyTree) -> dict[Keys, PyTree]:
    flat: dict[Keys, PyTree] = flatten_dict(tree)
    return flat


def _some(names: Sequence[str]) -> str:
    return f'({", ".join(names[:3])}{", ..." if len(names) > 3 else ""})'


def shapes(stage: Stage) -> Mapping[Keys, tuple[int, ...]]:
    """The shapes of a stage's parameters, by path."""
    return _shapes(cast(Hashable, stage))


@functools.lru_cache(maxsize=64)  # several ask, and a stage takes a moment to trace
def _shapes(stage: Any) -> Mapping[Keys, tuple[int, ...]]:
    c = stage.config
    x = jnp.zeros((1, 1), jnp.int32) if stage.embeds else jnp.zeros((1, 1, c.width))
    params = jax.eval_shape(stage.init, jax.random.key(0), x)['params']
    return {path: leaf.shape for path, leaf in _flat(params).items()}


def _names(stage: Stage, path: Keys, start: int) -> Iterator[str]:
    """The tensors of a parameter of a stage whose first block has number ``start``."""
    if isinstance(stage, gpt2.Stage):
        yield gpt2_file.name_of(path, start)
    elif path[0] == 'layers':
        rest = '.'.join(path[1:])
        yield from (f'model.layers.{start + i}.{rest}' for i in range(stage.blocks))
    else:
        yield '.'.join(path if path[0] == 'lm_head' else ('model', *path))


def write(
    folder: str | Path,
    described: Described,
    stages: Sequence[decoder.Stage],
    variables: Sequence[Mapping[str, Params]],
) -> None:
    """Writes a decoder as transformers loads it, with low-rank updates merged into their kernels.

    Args:
      folder: it is created if it does not exist.
      described: contents of the ``config.json`` that the model was read from.
      stages: all stages of the model.
      variables: one ``{'params': ...}`` per stage.

    Raises:
      ValueError: if the first and the last stage have different token tables.
      OSError: if the files cannot be written.
    """
    (root := Path(folder).expanduser()).mkdir(parents=True, exist_ok=True)
    trees = [_flat(v['params']) for v in variables]
    table, tied = ('embed_tokens', 'weight'), stages[0].config.tied and len(stages) > 1
    # A tied table stands in the file once, as the first stage's.
    if tied:
        if not np.array_equal(trees[0][table], trees[-1][table]):
            raise ValueError(
                'the first and the last stage have different token tables, and the file has one; '
                'train them tied (Task(tied=TABLE)), or freeze both'
            )
        trees[-1] = {path: leaf for path, leaf in trees[-1].items() if path != table}
    where, size, start, dtypes = {}, 0, 0, set()
    for s, (stage, tree) in enumerate(zip(stages, trees, strict=True)):
        one = f'model-{s + 1:05}-of-{len(stages):05}.safetensors'
        file = FILE if len(stages) == 1 else one
        tensors = dict(tensors_of(stage, _merged(stage, tree), start))
        save(tensors, root / file)
        where |= dict.fromkeys(tensors, file)
        size += sum(a.nbytes for a in tensors.values())
        dtypes |= {a.dtype.name for a in tensors.values()}
        start += stage.blocks
    if len(stages) > 1:
        dump({'metadata': {'total_size': size}, 'weight_map': where}, root / INDEX)
    old = ('torch_dtype', 'transformers_version', '_name_or_path')  # which names other weights
    entries = {k: v for k, v in described.items() if k not in old}
    named = {'architectures': [FAMILIES[described['model_type']].architecture]}
    dump({**entries, **named, 'dtype': max(dtypes)}, root / 'config.json')


def _merged(stage: decoder.Stage, tree: Mapping[Keys, PyTree]) -> dict[Keys, np.ndarray]:
    """The parameters of a stage without low-rank updates, which are added to their kernels."""
    full = {path: np.asarray(leaf) for path, leaf in tree.items() if path[-1] not in LOW_RANK}
    lora = stage.config.lora
    for path in tree:
        if lora and path[-1] == 'lora_a':
            a, b = (np.asarray(tree[*path[:-1], name], np.float32) for name in LOW_RANK)
            kernel = full[*path[:-1], 'weight']
            update = kernel + np.einsum('lor,lri->loi', b, a) * (lora.alpha / lora.rank)
            full[*path[:-1], 'weight'] = update.astype(kernel.dtype)
    return full


def tensors_of(
    stage: Stage, tree: Mapping[Keys, np.ndarray], start: int
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a stage by their names in a file."""
    for path, leaf in tree.items():
        rows = leaf if path[0] == 'layers' else leaf[None]
        for name, row in zip(_names(stage, path, start), rows, strict=True):
            yield name, np.ascontiguousarray(row)


def copy_companions(source: Path, folder: Path) -> None:
    """Copies what goes with weights, such as the tokenizer's files, if the source is a folder."""
    if source.is_dir() and source.resolve() != folder.resolve():
        for pattern in COMPANIONS:
            for file in source.glob(pattern):
                shutil.copyfile(file, folder / file.name)
