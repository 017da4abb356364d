"""`cost`: bits of a channel as compiled, its gap to Shannon's bound, its time in memcpys.

Bits are those of the message of a (8, 1024, 1024) bfloat16 tensor, the micro-batch of the dense
record (`study.bench.protocol`). Times are CPU-seconds of a float32 tensor of a shape, in
units of one memcpy of it: the best of repeats in which all functions take turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import spec
from jaxmp.grammar import KNOWN, above_shannon, own_words
from jaxmp.training.summary import provenance
from jaxmp.training.workdir.locks import write_json
from jaxmp.wire import Ctx, bits, like
from study.bench.entries import Entry
from study.bench.protocol import LENGTH, SAMPLES, WIDTH

NAMES = {'vocabulary': 256, 'examples': SAMPLES}  # what texts may call the numbers of the data
REPEATS = 5


class Cost(NamedTuple):
    """What a channel costs.

    Attributes:
      bits: per element.
      gap: bits per element above Shannon's bound on normal data; None of an exact one.
      encode: memcpys.
      decode: memcpys.
    """

    bits: float
    gap: float | None
    encode: float
    decode: float


def costs_of(entry: Entry, out: Path) -> tuple[Cost, Cost]:
    """The costs of both channels of an entry, which ``out`` keeps; what it lacks is measured."""

    def kept(text: str) -> Cost:
        path = out / 'costs' / f'{Entry(text, text, entry.codecs).name}.json'
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            measured = cost(text, entry.codecs)._asdict()
            write_json(path, {'text': text, 'codecs': entry.codecs, **measured, **provenance()})
        values = json.loads(path.read_text())
        return Cost(*(values[k] for k in Cost._fields))

    return kept(entry.fwd), kept(entry.bwd)


def cost(text: str, codecs: str = '', shape: tuple[int, ...] = (SAMPLES, LENGTH, WIDTH)) -> Cost:
    """Measures a channel.

    Args:
      text: of the algebra.
      codecs: files or modules of its own words, as ``config.codecs``.
      shape: of the tensor whose times are measured.

    Raises:
      ValueError: if the text names no channel, or one that does not stand by itself.
    """
    names = {**NAMES, **own_words(codecs)}
    channel = spec.parse(text, names)
    size = jax.ShapeDtypeStruct((SAMPLES, LENGTH, WIDTH), jnp.bfloat16)
    try:
        spent = bits(channel, size) / size.size
        gap = above_shannon(text, {**KNOWN, **names})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'{text} does not stand by itself at a boundary ({error}); give channels that do, as '
            '`jaxmp codecs` lists them'
        ) from None
    x = jax.random.normal(jax.random.key(0), shape)
    host, target = np.asarray(x), np.zeros(shape, np.float32)
    ctx = Ctx.example(x)
    tx, rx = channel.init(like(x))
    send = jax.jit(lambda x, tx: channel.send(x, tx, ctx))
    recv = jax.jit(lambda message, rx: channel.recv(message, rx, like(x), ctx))
    message, _ = send(x, tx)
    functions = {
        'memcpy': lambda: np.copyto(target, host),
        'encode': lambda: jax.block_until_ready(send(x, tx)),
        'decode': lambda: jax.block_until_ready(recv(message, rx)),
    }
    seconds = best(functions, 1 + REPEATS)  # the first run compiles
    unit = seconds['memcpy']
    return Cost(spent, gap, seconds['encode'] / unit, seconds['decode'] / unit)


def best(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """CPU-seconds, or those of a clock, of each function: best of ``repeats`` interleaved runs."""
    seconds = dict.fromkeys(functions, float('inf'))
    for _ in range(repeats):
        for name, f in functions.items():
            start = clock()
            f()
            seconds[name] = min(seconds[name], clock() - start)
    return seconds
