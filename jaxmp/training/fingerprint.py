"""`fingerprint`: what computes the numbers of a run, as short texts that its processes compare.

Equal configurations do not make equal numbers: another random generator puts `random_k` at other
positions, and another file behind an import path is another codec. The receiver of a message would
decode noise, and nobody would see it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxmp.codecs import raw
from jaxmp.config import KEYS, Config, flat
from jaxmp.data import documents
from jaxmp.exchange import Exchange
from jaxmp.exchange.collectives import Params, Tree, metered
from jaxmp.exchange.layout import State
from jaxmp.models import adapters
from jaxmp.plugins import module_of
from jaxmp.testing import QUICK
from jaxmp.training.experiment import Experiment
from jaxmp.wire import Codec, Ctx, like

SWITCHES = (  # of JAX: they decide random bits, dtypes, or how products are formed
    'jax_default_prng_impl', 'jax_threefry_partitionable', 'jax_random_seed_offset',
    'jax_high_dynamic_range_gumbel', 'jax_enable_x64', 'jax_explicit_x64_dtypes',
    'jax_default_matmul_precision',
)  # fmt: skip
FITTED = re.compile(r"""\bfitted\(\s*(?:file=)?['"](.+?)['"]""")  # the file of the word
SHAPE = 2, 4, 4, 2  # of the tensor that the probe sends: it compiles in a fraction of a second
GRID = 8.37  # levels below the largest value; odd, so that no codec's values lie between two


def fingerprint(exp: Experiment) -> dict[str, str]:
    """What computes the numbers of ``exp`` in this process, as texts by name.

    The switches of JAX by their environment variables, own files and weights by the keys that name
    them, random bits of a fixed key, a `digest` of a decoded message of each channel and exchange.
    """
    return {
        **switches(),
        **own_files(flat(exp.config.to_dict())),
        **weights(exp.config.model.path),
        **components(exp.config),
        'default float': jnp.result_type(float).name,
        'random bits': random_bits(),
        **crossed(exp),
        **{f'exchange={e}': exchanged(e) for e in exchanges(exp)},
    }


def switches() -> dict[str, str]:
    """The values of JAX's switches, by their environment variables."""
    return {name.upper(): str(getattr(jax.config, name, None)) for name in SWITCHES}


def own_files(config: Mapping[str, Any]) -> dict[str, str]:
    """A digest of the files that the values of ``config`` name by an import path, by key."""
    paths = {k: [v.rpartition(':')[0]] for k, v in config.items() if _is_own(k, v)}
    paths['codecs'] = [where.strip() for where in config['codecs'].split(',') if where.strip()]
    digests = {}
    for key, places in paths.items():
        files = sorted({f for where in places for f in sources(module_of(where, '', ''))})
        if files:
            hashed = hashlib.blake2b(digest_size=8)
            for file in files:
                hashed.update(file.name.encode() + b'\0' + file.read_bytes() + b'\0')
            names = ', '.join(file.name for file in files)
            digests[f'config.{key}'] = f'{names} {hashed.hexdigest()}'
    return digests


def weights(path: str) -> dict[str, str]:
    """A digest of the files of the checkpoint ``config.model.path``, by that key, if there is one.

    >>> weights('')
    {}
    """
    return {'config.model.path': adapters.digest(path)} if path else {}


def components(config: Config) -> dict[str, str]:
    """A digest of each file of components that the channels of a run name, by its name.

    >>> components({'fwd': 'nvfp4', 'bwd': 'mx(8)'})
    {}
    """
    files = {Path(f) for text in (config['fwd'], config['bwd']) for f in FITTED.findall(text)}
    return {f'fitted {file.name}': documents.digest(file.expanduser())[:16] for file in files}


def exported(folder: Path) -> dict[str, str]:
    """A digest of each file of weights in the folder that a run has written, by its name."""
    files = sorted(folder.glob('*.safetensors'))
    return {f'model/{file.name}': documents.digest(file)[:16] for file in files}


def _is_own(key: str, value: object) -> bool:
    return key in KEYS and bool(KEYS[key].own) and ':' in str(value)


def sources(module: ModuleType) -> set[Path]:
    """The file of a module, and of the modules in its folder that it imports, and so on."""
    files, waiting = set(), [module]
    while waiting:
        module = waiting.pop()
        file = Path(getattr(module, '__file__', None) or '')
        if file.suffix != '.py' or file in files:
            continue
        files.add(file)
        waiting += [m for m in _imports(module) if _folder(m) == file.parent]
    return files


def _imports(module: ModuleType) -> Iterator[ModuleType]:
    for value in list(vars(module).values()):
        name = str(getattr(value, '__module__', ''))
        if inspect.ismodule(value) or name in sys.modules:
            yield value if inspect.ismodule(value) else sys.modules[name]


def _folder(module: ModuleType) -> Path | None:
    file = getattr(module, '__file__', None)
    return Path(file).parent if file else None


def random_bits() -> str:
    """Bits of a fixed key, as `jax.random` makes them in this process.

    >>> with jax.threefry_partitionable(False):
    ...     other = random_bits()
    >>> random_bits() == other
    False
    """
    key = jax.random.fold_in(jax.random.key(0), 1)
    return ' '.join(f'{word:08x}' for word in np.asarray(jax.random.bits(key, (3,))))


def numbers() -> np.ndarray:
    """The tensor that the probe sends: distinct, none near zero, equal bits on every machine."""
    n = np.arange(1, 1 + np.prod(SHAPE), dtype=np.uint64)
    spread = n * 2654435761 % 2**32 / 2**31 - 1  # Knuth's multiplicative hash; exact
    return (np.sign(spread) * (0.25 + 0.75 * abs(spread))).reshape(SHAPE).astype(np.float32)


def digest(values: ArrayLike) -> str:
    """A text that is equal for equal numbers, and for numbers that differ by rounding alone.

    Machines may differ in the last bit of a sum. That must not refuse a run, so values count in
    ``GRID`` levels of the largest one. A sparse codec at another position, a code of another
    meaning, or another scale of some elements changes levels. Random rounding within a level does
    not, and there `random_bits` differ.

    >>> x = numbers()
    >>> digest(x) == digest(x * np.float32(1 + 1e-6)), digest(x) == digest(x[::-1])
    (True, False)
    """
    hashed = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(values):
        a = np.asarray(leaf, np.float64)
        scale = np.max(np.abs(a), initial=1e-30)
        with np.errstate(all='ignore'):  # a codec that gives infinity does so everywhere
            levels = np.rint(np.nan_to_num(a / scale * GRID, nan=100.0, posinf=101, neginf=-101))
        hashed.update(f'{leaf.dtype}{list(a.shape)}'.encode() + levels.astype(np.int8).tobytes())
    return hashed.hexdigest()


def crossed(exp: Experiment) -> dict[str, str]:
    """Digests of the first message of each channel, in all epochs, by the channel's text.

    A channel of fitted components takes the channels of its model alone; its file is compared.
    """
    cuts = [*exp.model.boundaries, *(cut for phase in exp.phases for cut in phase.boundaries)]
    probed = lambda channel: raw if FITTED.search(str(channel)) else channel.codec
    pairs = {(probed(cut.fwd), probed(cut.bwd)): cut for cut in cuts}
    texts = {}
    for (fwd, bwd), cut in pairs.items():
        there, back = computed(functools.partial(_crossing, fwd, bwd), numbers())
        texts |= {f'fwd={cut.fwd}': there, f'bwd={cut.bwd}': back}
    return texts


def _crossing(fwd: Codec, bwd: Codec, x: Array) -> tuple[Array, Array]:
    """What the two ends of a boundary decode where ``x`` crosses it and comes back."""
    ctx = Ctx.example(x)
    there, back = ctx.fold(0), ctx.fold(1)
    message = fwd.encode(x, there)
    back = back._replace(indices=fwd.indices(message, like(x), there))
    arrived = bwd.decode(bwd.encode(x, back), like(x), back)
    return fwd.decode(message, like(x), there), arrived


def exchanges(exp: Experiment) -> list[Exchange]:
    """The exchanges of a run between replicas, and between copies of a token table."""
    shared = list(exp.exchange.by_epoch) or [exp.exchange]
    between = [g.between for g in exp.groups if g.between and exp.parallel.apart]
    return shared * (exp.replicas > 1) + between


def exchanged(exchange: Exchange) -> str:
    """A digest of the parameters that equal gradients of two replicas give after a period."""

    def run(params: Params) -> tuple[Params]:
        via, key, state = metered(2, {}), jax.random.key(0), exchange.init(params, 2)

        def step(_: Array, now: tuple[Params, State]) -> tuple[Params, State]:
            grads, state = exchange.reduce(params, now[1], key, via)
            after = jax.tree.map(lambda p, g: p - 0.1 * g, now[0], grads)
            return exchange.after_update(after, state, key, via)

        return (jax.lax.fori_loop(0, exchange.period, step, (params, state))[0],)

    x = np.tile(numbers().reshape(-1), 4)
    return computed(run, {'kernel': x.reshape(16, 16), 'bias': x[:16]})[0]


def computed(function: Callable[[Tree], tuple[Tree, ...]], x: Tree) -> list[str]:
    """Digests of what ``function`` returns, by a program that is compiled in a hurry.

    An own codec may take no tensor such as ``x``. The run's own tensors may fit, so that is no
    error here; its file is compared by `own_files`.
    """
    hurry = QUICK if jax.default_backend() == 'cpu' else None  # elsewhere some are unknown
    try:
        return [digest(y) for y in jax.jit(function, compiler_options=hurry)(x)]
    except Exception as error:
        return [type(error).__name__] * 2
