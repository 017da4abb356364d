"""Two stages of a network in two processes, with compressed messages and error feedback.

    jaxmp launch --processes 2 -- python examples/mpmd.py

Process 0 has the images and the first stage, process 1 the labels and the second. A step is

    process 0                                    process 1
    h = front(x)
    send h        -- message forward -->         receive h', which is nearly h
                                                 loss, and its gradient g by h'
    receive g'    <-- message back --            send g
    gradient of front's parameters by g'         gradient of back's parameters
    update                                       update

`ef` is error feedback: a sender adds to each tensor what its messages have lost before. So both
ends of a boundary have states, which a step passes on as it does the optimizer's.

Nothing of jaxmp's trainer is used. `jaxmp.runtimes.mpmd` is this for any number of stages, with
micro-batches, schedules and replicas.
"""

import argparse
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from jaxmp import data
from jaxmp.net.arrays import buffers, filled
from jaxmp.net.connect import Address, connect
from jaxmp.net.group import ProcessGroup


def flat(images: jax.Array) -> jax.Array:
    """Images of bytes as vectors from 0 to 1."""
    return images.reshape(len(images), -1) / 255.0


BATCH, WIDTH, SEED = 60, 128, 0  # 60 divides the 360 images of the test
H = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)  # what crosses the boundary
FRONT = nn.Sequential([flat, nn.Dense(256), nn.relu, nn.Dense(WIDTH)])
BACK = nn.Sequential([nn.relu, nn.Dense(10)])
OPTIMIZER = optax.adam(1e-3)


class State(NamedTuple):
    """What a process keeps from step to step."""

    params: Any
    slots: optax.OptState
    tx: Any  # its end of the messages that it sends
    rx: Any  # its end of those that it receives


def start(cut: jaxmp.Boundary, process: int) -> State:
    """The state before the first step."""
    (forward_tx, forward_rx), (back_tx, back_rx) = cut.fwd.init(H), cut.bwd.init(H)
    if process == 0:
        module, x, tx, rx = FRONT, jnp.zeros((BATCH, 8, 8, 1)), forward_tx, back_rx
    else:
        module, x, tx, rx = BACK, jnp.zeros(H.shape), back_tx, forward_rx
    params = module.init(jax.random.key(process), x)
    return State(params, OPTIMIZER.init(params), tx, rx)


def updated(state: State, grads: Any) -> State:
    """The state after a step of the optimizer."""
    updates, slots = OPTIMIZER.update(grads, state.slots)
    return state._replace(params=optax.apply_updates(state.params, updates), slots=slots)


# The compiled programs. Both processes make the same context of a step: a random key and the ids of
# its examples. A codec that sends some elements only may need to know on the way back which ones
# the way forward had (`indices`).


@partial(jax.jit, static_argnums=0)
def front_forward(cut: jaxmp.Boundary, state: State, x: Any, ctx: jaxmp.Ctx) -> Any:
    """Process 0: the message forward, the state, and the context of the message back."""
    h: Any = FRONT.apply(state.params, x)
    message, tx, indices = cut.send('fwd', h, state.tx, ctx)
    return message, state._replace(tx=tx), ctx._replace(indices=indices)


@partial(jax.jit, static_argnums=0)
def front_backward(cut: jaxmp.Boundary, state: State, message: Any, x: Any, ctx: jaxmp.Ctx) -> Any:
    """Process 0: the state after the message back."""
    g, rx, _ = cut.recv('bwd', message, state.rx, (H, ctx))
    _, pull = jax.vjp(lambda params: FRONT.apply(params, x), state.params)  # runs it once more
    [grads] = pull(g)
    return updated(state._replace(rx=rx), grads)


@partial(jax.jit, static_argnums=0)
def back_step(cut: jaxmp.Boundary, state: State, message: Any, y: Any, ctx: jaxmp.Ctx) -> Any:
    """Process 1: the message back, the state, the loss, and how many images it knows."""

    def loss(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits: Any = BACK.apply(params, h)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return nats.mean(), (logits.argmax(-1) == y).sum()

    h, rx, indices = cut.recv('fwd', message, state.rx, (H, ctx))
    value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (nats, hits), (grads, g) = value_and_grad(state.params, h)
    message, tx, _ = cut.send('bwd', g, state.tx, ctx._replace(indices=indices))
    return message, updated(state._replace(tx=tx, rx=rx), grads), nats, hits


def send(group: ProcessGroup, message: Any) -> None:
    """Sends the arrays of a message to the other process; does not wait until they are there."""
    parts = buffers(jax.tree.leaves(message))
    group.send(1 - group.index, group.address('message'), *parts)


def receive(group: ProcessGroup, shapes: Any) -> Any:
    """The next message of the other process, when it is there."""
    leaves, tree = jax.tree.flatten(shapes)
    parts = group.receive(1 - group.index, group.address('message'))
    return jax.tree.unflatten(tree, filled(parts, leaves))


def step(cut: jaxmp.Boundary, group: ProcessGroup, state: State, number: int, batch: dict) -> Any:
    """A step of this process: the state, and in process 1 the loss and the hits."""
    group.begin(number)  # messages are addressed by their step
    key = jax.random.fold_in(jax.random.key(SEED), number)
    ctx, (forward, back) = jaxmp.Ctx(key, batch['id']), cut.messages(H)
    if group.index == 0:
        message, state, ctx = front_forward(cut, state, batch['x'], ctx)
        send(group, message)
        return front_backward(cut, state, receive(group, back), batch['x'], ctx), None
    message, state, *values = back_step(cut, state, receive(group, forward), batch['y'], ctx)
    send(group, message)
    return state, values


def run(cut: jaxmp.Boundary, group: ProcessGroup, epochs: int) -> None:
    """Trains and tests; process 0 says how it went, which process 1 tells it."""
    digits, state, number = data.load('digits'), start(cut, group.index), 0
    say = print if group.index == 0 else lambda line: None
    for epoch in range(epochs):
        losses = []
        for batch in data.batches(
            digits.train, BATCH, data.order(SEED, epoch, len(digits.train.y))
        ):
            state, values = step(cut, group, state, number := number + 1, batch)
            losses += values[:1] if values else []
        [_, loss] = group.share(float(np.mean(losses)) if losses else None)
        say(f'epoch {epoch + 1}: loss {loss:.6f}')
    fresh = start(cut, group.index)._replace(params=state.params)  # a test remembers nothing
    hits = 0
    for batch in data.batches(digits.test, BATCH):
        _, values = step(cut, group, fresh, number := number + 1, batch)  # and updates nothing
        hits += int(values[1]) if values else 0
    [_, hits] = group.share(hits)
    say(f'test: {hits / len(digits.test.y):.2%} of the images are known')
    for way, bits in zip(('forward', 'back'), cut.bits(H), strict=True):
        say(f'{way}: {bits // 8:,} bytes a message, {32 * H.size / bits:.1f} times fewer')


def main() -> None:
    """Meets the other process."""
    parser = argparse.ArgumentParser(description='Two stages in two processes.')
    parser.add_argument('--fwd', default='ef(mx(4))', help='codec and feedback of activations')
    parser.add_argument('--bwd', default='ef(mx(4))', help='codec and feedback of gradients')
    parser.add_argument('--epochs', type=int, default=10)
    for name, kind in ('coordinator', str), ('processes', int), ('process', int):
        parser.add_argument(f'--{name}', type=kind, help='set by jaxmp launch')
    args = parser.parse_args()
    if args.processes != 2:
        parser.error('start it as: jaxmp launch --processes 2 -- python examples/mpmd.py')
    cut = jaxmp.boundary(jaxmp.parse(args.fwd), jaxmp.parse(args.bwd))
    address = Address(args.coordinator, args.processes, args.process)
    same = {'fwd': args.fwd, 'bwd': args.bwd, 'epochs': args.epochs}  # in both, or neither begins
    group = connect(address, parts=[0, 1], about=same)
    run(cut, group, args.epochs)
    group.close()


if __name__ == '__main__':
    main()
