"""Candidates at the boundaries: times and errors on activations and gradients of the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.feedback import Channel
from jaxmp.net.connect import processes
from jaxmp.plan.choose import Candidate
from jaxmp.plan.clock import PASSES, Clock, timed
from jaxmp.plan.loss import label_gradients, nats, weighed
from jaxmp.plan.predict import Edge, Line
from jaxmp.plan.seen import relative_error
from jaxmp.plan.steps import Trained
from jaxmp.runtimes.links import remote_move
from jaxmp.runtimes.placement import Elsewhere
from jaxmp.training.experiment import Experiment
from jaxmp.wire import Ctx, bits, like

LEAST = 4  # candidates
LESSON = 100  # messages from which klt learns components: two books
HANDOVERS = 30  # of a message of each size; the median counts
SIZES = 2**12, 2**20  # bytes
SHARE = 0.75  # of the time, at whose end no further candidate is measured


def measured(
    found: Mapping[Edge, Mapping[str, Channel]],
    exp: Experiment,
    trained: Trained,
    clock: Clock,
    in_nats: bool = False,
) -> dict[Edge, list[Candidate]]:
    """The candidates of each edge, as many as the time allows, in turns of all edges.

    Args:
      found: candidates by edge, of which the first `LEAST` are always measured.
      exp: of the probe.
      trained: its training steps, whose tensors cross.
      clock: of the probe.
      in_nats: whether errors of activations are predicted in nats too.
    """
    count = exp.config.parallel.num_microbatches
    labels = label_gradients(exp, trained) if in_nats else {}
    rows: dict[Edge, list[Candidate]] = {edge: [] for edge in found}
    for i in range(max(map(len, found.values()))):
        turn = {edge: list(own.items())[i] for edge, own in found.items() if i < len(own)}
        if i >= LEAST and clock.spent(SHARE):
            left = dict.fromkeys(t for own in found.values() for t in list(own)[i:])
            clock.say(f'no time for {"; ".join(left)}: give more --seconds, or fewer codecs')
            break
        clock.say('; '.join(dict.fromkeys(text for text, _ in turn.values())))
        ends = {text: compiled(channel) for text, channel in turn.values()}
        for edge, (text, channel) in turn.items():
            tensors = trained.tensors[edge]
            encode, decode, error, arrived = crossed(channel, ends[text], tensors)
            if edge[0] < edge[1] and (back := trained.tensors.get((edge[1], edge[0]))):
                error = weighed(tensors, arrived, back)
            size = bits(channel, like(tensors[0]))
            times = count * encode, count * decode, count * size / 8
            lost = nats(tensors, arrived, labels[edge]) if edge in labels else 0.0
            rows[edge].append(Candidate(text, size / tensors[0].size, error, *times, lost))
    return rows


def compiled(channel: Channel) -> tuple[Any, Any]:
    """Both ends of a channel, ``(x, tx, key)`` and ``(message, rx, like, key)``."""
    send = jax.jit(lambda x, tx, key: channel.send(x, tx, Ctx(key)))
    recv = lambda message, rx, like, key: channel.recv(message, rx, like, Ctx(key))
    return send, jax.jit(recv, static_argnums=2)


def crossed(
    channel: Channel, ends: tuple[Any, Any], tensors: Sequence[Array]
) -> tuple[float, float, float, dict[int, Array]]:
    """Median seconds to encode and to decode, the relative squared error, and what arrived.

    The tensors cross one after another, so that a rule of feedback has its state; of error and
    arrivals the later half of them counts. A rule that learns of channels, such as `jaxmp.klt`,
    has `LESSON` messages of the other half before.
    """
    (send, recv), x = ends, like(tensors[0])
    tx, rx = channel.init(x)
    times, arrived = [], {}
    half, n = max(1, len(tensors) // 2), len(tensors)
    lesson = [i % half for i in range(LESSON)] if channel.state_of == 'channel' else []
    order = [*lesson, *(i % n for i in range(max(n, 1 + PASSES)))]
    for i, at in enumerate(order):
        tensor, key = tensors[at], jax.random.key(i)
        encode, (message, tx) = timed(send, tensor, tx, key)
        decode, (y, rx) = timed(recv, message, rx, x, key)
        times.append((encode, decode))
        if n // 2 <= i - len(lesson) < n:
            arrived[at] = y
    error = relative_error([tensors[i] for i in arrived], list(arrived.values()))
    encode, decode = (statistics.median(t) for t in zip(*times[1:], strict=True))
    return encode, decode, error, arrived


def handover() -> tuple[Line, Line]:
    """Seconds of a message besides the link, and those by which it holds up computing.

    Both are lines through the medians of two sizes.
    """
    (seconds, busy), (longer, busier) = (handed_over(size) for size in SIZES)
    return _line(seconds, longer), _line(busy, busier)


def _line(small: float, large: float) -> Line:
    return Line(small, max(0.0, large - small) / (SIZES[1] - SIZES[0]))


def handed_over(nbytes: int) -> tuple[float, float]:
    """Median seconds of a message, and those by which it holds up computing.

    The message goes from one thread of this process to another through connections, encrypted, as
    between processes, while the device computes; the threads wait for a core where computing takes
    all. Then computing takes longer than alone, by what both ends of a message need.
    """
    device, message = jax.devices()[0], jnp.zeros((1, nbytes // 4))
    compute = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, x: jnp.tanh(x @ x), x))
    x, times, busy = jax.block_until_ready(compute(jnp.zeros((512, 512)))), [], []
    jax.block_until_ready(message)
    with processes(2) as groups, ThreadPoolExecutor(1) as sender, ThreadPoolExecutor(1) as receiver:
        source = remote_move(groups[0], (device, Elsewhere(1)), message)
        target = remote_move(groups[1], (Elsewhere(0), device), message)
        for _ in range(HANDOVERS):
            addresses = [group.address('handover') for group in groups]
            alone, _ = timed(compute, x)
            start, beside = time.monotonic(), compute(x)
            left = time.monotonic()
            sent = sender.submit(source, message, addresses[0])
            jax.block_until_ready(receiver.submit(target, None, addresses[1]).result())
            times.append(time.monotonic() - left)
            sent.result()
            jax.block_until_ready(beside)
            busy.append(time.monotonic() - start - alone)
    return statistics.median(times), max(0.0, statistics.median(busy))
