"""Candidates at the boundaries: times and errors on activations and gradients of the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp import data, spec
from jaxmp.codecs import raw
from jaxmp.feedback import Channel, direct
from jaxmp.net.connect import processes
from jaxmp.net.group import ProcessGroup
from jaxmp.pipeline import pipeline
from jaxmp.plan.choose import Candidate
from jaxmp.plan.clock import PASSES, Clock, timed
from jaxmp.plan.predict import Edge
from jaxmp.runtimes.links import remote_move
from jaxmp.runtimes.placement import Elsewhere
from jaxmp.training.experiment import Experiment
from jaxmp.training.portable import name
from jaxmp.training.probe import keeping
from jaxmp.training.step import train_step
from jaxmp.training.trainer import Trainer
from jaxmp.wire import Ctx, Like, bits, like

STEPS = 30  # of training before the snapshots, at most
SNAPSHOTS = 4  # steps in a row whose tensors are kept
LEAST = 4  # candidates
HANDOVERS = 30  # of an empty message; the median counts
SHARES = {'training': 0.25, 'codecs': 0.75}  # of the time, at whose end a part stops

Tensors = Mapping[Edge, Sequence[Array]]


class Trained(NamedTuple):
    """What the training steps of a probe gave.

    Attributes:
      tensors: what micro-batch 0 sent over each edge in the last steps, in their order.
      variables: of all stages after them.
      gradients: median seconds of a step until its gradients are there.
      rest: median seconds per stage of what follows: a tied table's exchange, clipping, the
        optimizer.
    """

    tensors: Tensors
    variables: Sequence[Any]
    gradients: float
    rest: float


def candidates(texts: Iterable[str], names: Mapping[str, Any], like: Like) -> dict[str, Channel]:
    """The channels that texts name.

    Raises:
      ValueError: if a text names no channel, or one that does not stand by itself.
    """
    found = {}
    for text in texts:
        channel = spec.parse(text, names)
        if channel.is_table:
            raise ValueError(
                f'--codecs: {text} keeps a state per example, which a probe cannot fill; give '
                'codecs, or rules of feedback such as ef21'
            )
        if 'spread' in channel.needs:
            raise ValueError(
                f'--codecs: {text} is for activations whose gradient returns through klt, and a '
                'plan has each crossing by itself; give it without by_gradient'
            )
        try:
            bits(channel, like)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f'--codecs: {text} does not stand by itself at a boundary ({error}); give channels '
                'that do, as `jaxmp codecs` lists them'
            ) from None
        found[text] = channel
    return found


def trained(exp: Experiment, clock: Clock) -> Trained:
    """Training steps without compression, until a share of the time is over."""
    keep, n = keeping(direct(raw)), len(exp.task.stages) - 1
    kept = exp._replace(model=pipeline(exp.task.stages, [keep] * n, [keep] * n))
    trainer, size = Trainer(kept, ProcessGroup()), exp.config.batch_size
    via: Any = Gradients(trainer.training)
    rules, state = trainer.rules(0), trainer.create()
    found, times, i = [], [], 0
    while len(found) < SNAPSHOTS or not (i >= STEPS or clock.spent(SHARES['training'])):
        rows = data.order(exp.config.seed, i // exp.epoch_steps, len(exp.data.train.y))
        first = i % exp.epoch_steps * size
        [batch] = data.batches(exp.data.train, size, rows[first : first + size])
        state, _ = train_step(rules, via, trainer.across, (state, batch))
        jax.block_until_ready(state)
        times.append((via.seconds, time.monotonic() - via.end))
        parts = trainer.export(state).parts
        found.append([parts[name(s, 0)]['feedback'] for s in range(n + 1)])
        found, i = found[-SNAPSHOTS:], i + 1
    clock.say(f'{i} training steps done')
    first = lambda kept: jnp.asarray(kept.tensor[0])
    ways: dict[Edge, list[Array]] = {}
    for s in range(n):
        ways[s, s + 1] = [first(stages[s].right_tx) for stages in found]
        ways[s + 1, s] = [first(stages[s + 1].left_tx) for stages in found]
    variables = jax.device_put(trainer.weights(state), jax.devices()[0])
    gradients, rest = (statistics.median(t) for t in zip(*times[1:], strict=True))
    return Trained(ways, variables, gradients, rest / (n + 1))


class Gradients:
    """A runtime that waits for its gradients, and keeps their seconds and the time of their end."""

    def __init__(self, runtime: Any) -> None:
        """Wraps a runtime."""
        self._runtime, self.seconds, self.end = runtime, 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        """What is not said here is the runtime's."""
        return getattr(self._runtime, name)

    def value_and_grad(self, *given: Any) -> Any:
        """See `Runtime`."""
        self.seconds, found = timed(self._runtime.value_and_grad, *given)
        self.end = time.monotonic()
        return found


def measured(
    texts: Mapping[str, Channel], tensors: Tensors, count: int, clock: Clock
) -> dict[Edge, list[Candidate]]:
    """The candidates of each edge, as many as the time allows, the same ones everywhere.

    Args:
      texts: candidates, of which the first `LEAST` are always measured.
      tensors: of a micro-batch.
      count: micro-batches of a batch.
      clock: of the probe.
    """
    found: dict[Edge, list[Candidate]] = {edge: [] for edge in tensors}
    for i, (text, channel) in enumerate(texts.items()):
        if i >= LEAST and clock.spent(SHARES['codecs']):
            left = list(texts)[i:]
            clock.say(f'no time for {"; ".join(left)}: give more --seconds, or fewer codecs')
            break
        clock.say(text)
        send, recv = compiled(channel)
        for edge, own in tensors.items():
            encode, decode, error = crossed(channel, (send, recv), own)
            size = bits(channel, like(own[0]))
            times = count * encode, count * decode, count * size / 8
            found[edge].append(Candidate(text, size / own[0].size, error, *times))
    return found


def compiled(channel: Channel) -> tuple[Any, Any]:
    """Both ends of a channel, ``(x, tx, key)`` and ``(message, rx, like, key)``."""
    send = jax.jit(lambda x, tx, key: channel.send(x, tx, Ctx(key)))
    recv = lambda message, rx, like, key: channel.recv(message, rx, like, Ctx(key))
    return send, jax.jit(recv, static_argnums=2)


def crossed(
    channel: Channel, ends: tuple[Any, Any], tensors: Sequence[Array]
) -> tuple[float, float, float]:
    """Median seconds to encode and to decode, and the relative squared error.

    The tensors cross one after another, so that a rule of feedback has its state; of the error the
    later half of them counts.
    """
    (send, recv), x = ends, like(tensors[0])
    tx, rx = channel.init(x)
    times, squares = [], []
    rounds = [*tensors, *tensors[: max(0, 1 + PASSES - len(tensors))]]
    for i, tensor in enumerate(rounds):
        key = jax.random.key(i)
        encode, (message, tx) = timed(send, tensor, tx, key)
        decode, (y, rx) = timed(recv, message, rx, x, key)
        times.append((encode, decode))
        if len(tensors) // 2 <= i < len(tensors):
            wide = np.asarray(tensor, np.float64)
            squares.append((np.sum((np.asarray(y, np.float64) - wide) ** 2), np.sum(wide**2)))
    wrong, whole = np.sum(squares, axis=0)
    encode, decode = (statistics.median(t) for t in zip(*times[1:], strict=True))
    return encode, decode, float(wrong / whole) if whole else float(wrong > 0)


def handover() -> tuple[float, float]:
    """Median seconds of a message besides its bytes, and those by which it holds up computing.

    The message goes from one thread of this process to another through connections, as between
    processes, while the device computes; the threads wait for a core where computing takes all.
    Then computing takes longer than alone, by what both ends of a message need.
    """
    device, message = jax.devices()[0], jax.block_until_ready(jnp.zeros((1, 1024)))
    compute = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, x: jnp.tanh(x @ x), x))
    x, times, busy = jax.block_until_ready(compute(jnp.zeros((512, 512)))), [], []
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
