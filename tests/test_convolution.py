"""The CPU forms of convolutions against XLA's own, and memory kept between steps."""

import functools
import math
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmp.models import convolution
from jaxmp.models.convolution import LAYOUT, convolve
from jaxmp.models.resnet import Stage
from jaxmp.runtimes import allocator

LARGE, SMALL = ((4, 16, 16, 16), (3, 3, 16, 8)), ((4, 2, 2, 5), (3, 3, 5, 3))
WIDE = (4, 12, 12, 5), (5, 5, 5, 6)
ONE = ((1, 1), (1, 1))
FILTERED = [  # by Winograd's form
    ((4, 17, 16, 64), (3, 3, 64, 70)),
    ((8, 9, 8, 128), (3, 3, 128, 129)),
]
SHAPES = [  # input, kernel, strides, padding
    (*LARGE, (1, 1), ONE),
    ((6, 33, 32, 16), (3, 3, 16, 8), (2, 2), ONE),
    ((5, 32, 31, 16), (3, 2, 16, 4), (1, 2), ((2, 0), (0, 1))),
    ((3, 32, 32, 32), (1, 1, 32, 8), (2, 2), ((0, 0), (0, 0))),
    (*SMALL, (1, 1), ONE),
    ((4, 3, 2, 5), (3, 3, 5, 3), (2, 2), ONE),
    (*WIDE, (1, 1), ((0, 0), (0, 0))),
    ((4, 28, 27, 1), (5, 6, 1, 4), (2, 3), ((2, 0), (1, 3))),
    *((*layer, (1, 1), pads) for layer in FILTERED for pads in (ONE, ((2, 0), (0, 1)))),
    *((*layer, (1, 1), ((3, 0), (0, -1))) for layer in (LARGE, WIDE, FILTERED[1])),  # rows cut
]


@pytest.fixture(autouse=True)
def any_work(monkeypatch):
    """Small layers take Winograd's form, too."""
    monkeypatch.setattr(convolution, 'WORK', 0)


def arrays(x, kernel, dtype=jnp.float32):
    """Normal data, and a kernel that keeps its variance, as in a network."""
    keys = jax.random.split(jax.random.key(0))
    x, kernel = (jax.random.normal(k, s, dtype) for k, s in zip(keys, (x, kernel), strict=True))
    return x, kernel * math.prod(kernel.shape[:3]) ** -0.5


def gradients(f, strides=(1, 1), padding=ONE):
    f = functools.partial(f, window_strides=strides, padding=padding, dimension_numbers=LAYOUT)
    value = lambda x, kernel: jnp.sum(jnp.sin(f(x, kernel)).astype(jnp.float32))
    return jax.value_and_grad(value, (0, 1))


def apart(ours, own):
    """The largest relative difference."""
    far = lambda a, b: jnp.abs(a - b).max() / jnp.abs(b).max()
    wide = lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32))
    pairs = zip(*([*map(wide, jax.tree.leaves(t))] for t in (ours, own)), strict=True)
    return max(float(far(a, b)) for a, b in pairs)


@pytest.mark.parametrize(
    'case', [*SHAPES[:8], *(pytest.param(c, marks=pytest.mark.slow) for c in SHAPES[8:])], ids=str
)
def test_gradients_are_those_of_xla(case):
    how = dict(zip(('window_strides', 'padding'), case[2:], strict=True))
    how['dimension_numbers'] = LAYOUT

    def of(f):
        result = jax.jit(functools.partial(f, **how))(*arrays(*case[:2]))
        return result, jax.jit(gradients(f, *case[2:]))(*arrays(*case[:2]))[1]

    assert apart(of(convolve), of(lax.conv_general_dilated)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('case', [LARGE, SMALL, WIDE, FILTERED[1]], ids=str)
@pytest.mark.parametrize(('dtype', 'bar'), [('float64', 1e-13), ('bfloat16', 1e-2)])
def test_other_dtypes(case, dtype, bar):
    with jax.enable_x64(dtype == 'float64'):
        of = lambda f: jax.jit(gradients(f))(*arrays(*case, dtype))[1]  # the value is a float32
        ours, own = of(convolve), of(lax.conv_general_dilated)
        assert [a.dtype for a in ours] == [dtype, dtype]
        assert apart(ours, own) < bar


@pytest.mark.slow
@pytest.mark.parametrize('case', [LARGE, SMALL, WIDE, FILTERED[1]], ids=str)
def test_within_transformations(case):
    x, kernel = arrays(*case)
    mesh = jax.make_mesh((1,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))

    def of(f):
        g, each = gradients(f), (P('d'), P())
        specs = {'in_specs': each, 'out_specs': each}
        shard = jax.shard_map(lambda x, k: g(x, k)[1], mesh=mesh, **specs)
        again = lambda f: lambda x, k, **how: jax.checkpoint(functools.partial(f, **how))(x, k)
        return jax.jit(
            lambda x, k: (
                jax.vmap(g, (0, None))(jnp.stack([x, 2 * x]), k),
                lax.scan(lambda c, _: (c, g(x, c)), k, None, length=2)[1],
                lax.switch(jnp.int32(x[0, 0, 0, 0] > 9), [g, lambda x, k: g(2 * x, k)], x, k),
                gradients(again(f))(x, k),
                shard(x, k),
            )
        )(x, kernel)

    ours, own = of(convolve), of(lax.conv_general_dilated)
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, own)
    # The value is a sum of sines, most of which cancel: jax 0.10.1 adds them one after another, so
    # that it is 9e-5 off for both (in float64 none is). The convolution is in the gradients.
    arrays_of = lambda tree: [a for a in jax.tree.leaves(tree) if a.ndim > 1]
    assert apart(arrays_of(ours), arrays_of(own)) < 1e-5


@pytest.mark.parametrize('case', [LARGE, SMALL, WIDE, FILTERED[1]], ids=str)
def test_products_are_for_cpu_only(case):
    traced = jax.jit(gradients(convolve)).trace(*arrays(*case))
    products = {
        p: traced.lower(lowering_platforms=(p,)).as_text().count('dot_general')
        for p in ('cpu', 'cuda')
    }
    assert products['cuda'] == 0 < products['cpu']


def test_many_channels_need_no_convolution():
    text = jax.jit(gradients(convolve)).lower(*arrays(*FILTERED[1])).as_text()
    assert 'convolution' not in text


@pytest.mark.parametrize(('batch', 'channels'), [(4, 63), (3, 64)])
def test_few_channels_or_places_need_one(batch, channels):
    shapes = (batch, 17, 8, channels), (3, 3, channels, 64)
    text = jax.jit(gradients(convolve)).lower(*arrays(*shapes)).as_text()
    assert 'convolution' in text


def test_little_work_needs_one(monkeypatch):
    monkeypatch.setattr(convolution, 'WORK', 1 + 8 * 9 * 8 * 128 * 129)
    text = jax.jit(gradients(convolve)).lower(*arrays(*FILTERED[1])).as_text()
    assert 'convolution' in text


@pytest.mark.slow
def test_no_gradient_of_the_images():
    x = jnp.ones((4, 32, 32, 3))
    stage = Stage(16, 1, stem=True)
    variables = stage.init(jax.random.key(0), x, True)
    loss = lambda v, x: jnp.sum(stage.apply(v, x, True, mutable=['batch_stats'])[0])
    text = jax.jit(jax.grad(loss)).lower(variables, x).compile().as_text()
    both = jax.jit(jax.grad(loss, (0, 1))).lower(variables, x).compile().as_text()
    made = 'f32[4,32,32,3]{3,2,1,0} convolution('
    assert made in both
    assert made not in text


KEPT = """
import resource, jax, jax.numpy as jnp, numpy as np
from jaxmp.runtimes.allocator import keep_freed_pages
{call}
f, x = jax.jit(lambda x: (x @ x) @ (x @ x + 1)), jnp.ones((2048, 2048))

def large():
    block = np.empty(3 << 30, np.uint8)  # of which 48 pages are touched
    block[:: 1 << 26] = 1

def faults(call):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(*(min(faults(call) for _ in range(8)) for call in (lambda: f(x).block_until_ready(), large)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='glibc keeps pages')
def test_freed_pages_are_kept():
    def run(call):
        command = [sys.executable, '-c', KEPT.format(call=call)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return map(int, out.split())

    pages = 2048 * 2048 * 4 // 4096
    (kept, kept_large), (step, large) = run('keep_freed_pages()'), run('')
    assert kept < pages < step
    assert kept_large < 40 < large


def test_freed_pages_are_not_kept_with_a_gpu_or_many_cores(tmp_path, monkeypatch):
    """The threads that compile would wait for the one arena."""
    called = []
    library = types.SimpleNamespace(mallopt=lambda *arguments: called.append(arguments))
    monkeypatch.setattr(allocator.ctypes, 'CDLL', lambda name: library)
    monkeypatch.setattr(allocator, '_keeping', [])
    monkeypatch.setattr(allocator.jax.monitoring, 'register_event_duration_secs_listener', id)
    nowhere = tmp_path / 'none'
    for driver, platforms, cores, keeps in (
        (tmp_path, None, 2, False), (tmp_path, 'cuda', 2, False), (tmp_path, 'cpu', 2, True),
        (nowhere, None, 4, True), (nowhere, None, 5, False),
    ):  # fmt: skip
        monkeypatch.setattr(allocator, 'cores', lambda n=cores: n)
        monkeypatch.setattr(allocator, 'DRIVER', driver)
        config = types.SimpleNamespace(jax_platforms=platforms)
        monkeypatch.setattr(allocator.jax, 'config', config)
        called.clear()
        allocator.keep_freed_pages()
        assert bool(called) == keeps


AFTER = """
import numpy as np
from jaxmp.runtimes.allocator import keep_freed_pages, pages_after_step

def resident():
    return int(open('/proc/self/statm').read().split()[1])

def left(seconds):
    pages_after_step(seconds)
    before = resident()
    for _ in range(2):
        above, block = np.ones(1 << 10), np.ones(1 << 23)
        beside = np.ones(1 << 10)  # which keeps the heap from shrinking
        del block
    return resident() - before

keep_freed_pages()
print(left(0.1), left(2.0), left(0.1))
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='glibc keeps pages')
def test_long_steps_return_their_large_blocks():
    """Of 64 MiB, 16,384 pages: kept after a short step, gone at once after a long one."""
    command = [sys.executable, '-c', AFTER]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    short, long, again = map(int, out.split())
    assert min(short, again) > 16_000 > 1_000 > long
