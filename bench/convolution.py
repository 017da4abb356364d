"""CPU-seconds of ResNet-18's steps and of its layers: our convolutions, XLA's own, and torch's.

Steps and layers of all kinds are interleaved in one process; the best of the repeats counts. The
limit of a layer is a matrix product of its size. Torch (2.13.0, in the layout that is faster on a
CPU, channels last) is measured if it is installed. Rows go to standard output as JSON.

taskset -c 0 python bench/convolution.py [repeats [0]]   (5: four minutes on a free core)
With 0, memory is returned to the system after each step, and layers are left out.
"""

import functools
import itertools
import json
import os
import sys

os.environ.setdefault('XLA_FLAGS', '--xla_cpu_multi_thread_eigen=false')

import jax
import jax.numpy as jnp
import step
from timing import best, compiled, keep_freed_pages

from jaxmp.models import convolution
from jaxmp.training.summary import provenance

BATCH = 100
STEPS = [(64, 32), (16, 32), (8, 32), (16, 16), (8, 16)]  # width, pixels per side
OURS = convolution.LARGE, convolution._product, convolution._filtered


def choose(own):
    """Whether the layers that are traced next take XLA's form."""
    never = sys.maxsize, lambda *_: None, lambda *_: False
    chosen = never if own else OURS
    convolution.LARGE, convolution._product, convolution._filtered = chosen


def jax_step(width, size, own):
    """A compiled step that keeps its state, and the CPU-seconds of compiling it."""
    choose(own)
    run, state = step.stepper(width, BATCH, 'raw', 'raw', size)
    made = []
    seconds = best({'': lambda: made.append(run.lower(*state).compile())}, 1)['']

    def again():
        nonlocal state
        *state, loss = made[0](*state)
        float(loss)

    return again, seconds


def torch_step(width, size):
    """The same network and optimizer in torch."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    conv = functools.partial(nn.Conv2d, bias=False)

    class Block(nn.Module):
        def __init__(self, i, o, stride):
            super().__init__()
            first = conv(i, o, 3, stride, 1), nn.BatchNorm2d(o), nn.ReLU()
            self.body = nn.Sequential(*first, conv(o, o, 3, 1, 1), nn.BatchNorm2d(o))
            cut = nn.Sequential(conv(i, o, 1, stride), nn.BatchNorm2d(o))
            self.cut = nn.Identity() if (i, stride) == (o, 1) else cut

        def forward(self, x):
            return torch.relu(self.body(x) + self.cut(x))

    channels = [width, width, 2 * width, 4 * width, 8 * width]
    stem = conv(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()
    pairs = list(itertools.pairwise(channels))
    blocks = [
        b for n, (i, o) in enumerate(pairs) for b in (Block(i, o, 1 + (n > 0)), Block(o, o, 1))
    ]
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)
    net = nn.Sequential(*stem, *blocks, *end).to(memory_format=torch.channels_last)
    x = torch.randn(BATCH, 3, size, size).to(memory_format=torch.channels_last)
    y, optimizer = torch.arange(BATCH) % 10, torch.optim.SGD(net.parameters(), 0.01)

    def again():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        loss.item()

    return again


def steps(repeats):
    """Rows of the steps."""
    for width, size in STEPS:
        ours, ours_compiles = jax_step(width, size, own=False)
        own, own_compiles = jax_step(width, size, own=True)
        kinds = {'ours': ours, 'xla': own}
        try:
            kinds['torch'] = torch_step(width, size)
        except ModuleNotFoundError:
            print('no torch', file=sys.stderr)
        best(kinds, 2)
        row = {'kind': 'step', 'width': width, 'size': size, 'batch': BATCH}
        compiling = {'ours_compiling': ours_compiles, 'xla_compiling': own_compiles}
        yield row | best(kinds, repeats if width == 64 else 4 * repeats) | compiling


def layers(width, size):
    """Image side, input and output channels, kernel and stride of each kind of layer."""
    yield size, 3, width, 3, 1
    for n in range(4):
        C = width << n
        yield size >> n, C, C, 3, 1
        if n < 3:
            yield from ((size >> n, C, 2 * C, k, 2) for k in (3, 1))


def layer(repeats, H, C, O, k, stride):
    """GFLOP/s of the passes of a layer, and of a matrix product of its size."""
    x, kernel = jnp.ones((BATCH, H, H, C)), jnp.ones((k, k, C, O))
    pads = ((k // 2, k // 2),) * 2
    args = {'window_strides': (stride, stride), 'padding': pads}
    g = jnp.ones((BATCH, H // stride, H // stride, O))
    m, n = BATCH * (H // stride) ** 2, k * k * C
    f = functools.partial(convolution.convolve, dimension_numbers=convolution.LAYOUT, **args)
    runs = {}
    for name in ('', '_xla'):
        choose(own=bool(name))
        of = lambda i: lambda x, w, g: jax.vjp(f, x, w)[1](g)[i]
        for what, run in {
            'forward': lambda x, w, g: f(x, w),
            'input': of(0),
            'kernel': of(1),
        }.items():
            runs[what + name] = compiled(run, x, kernel, g)
    runs['product'] = compiled(jnp.matmul, jnp.ones((m, n)), jnp.ones((n, O)))
    runs['product_kernel'] = compiled(jnp.matmul, jnp.ones((n, m)), jnp.ones((m, O)))
    gflop = 2e-9 * m * n * O
    return {name: gflop / seconds for name, seconds in best(runs, repeats).items()}


def main(repeats=5, pages=1):
    if pages:
        keep_freed_pages()
    print(json.dumps({'kind': 'run', 'command': 'bench/convolution.py', 'seed': 0, **provenance()}))
    for row in steps(repeats):
        print(json.dumps(row | {'pages_kept': bool(pages)}), flush=True)
    if not pages:
        return
    for width, size in ((64, 32), (16, 32), (8, 16)):
        for H, C, O, k, stride in layers(width, size):
            key = {'kind': 'layer', 'width': width, 'image': H, 'inputs': C, 'outputs': O}
            key |= {'taps': k, 'stride': stride}
            print(json.dumps(key | layer(repeats, H, C, O, k, stride)), flush=True)


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
