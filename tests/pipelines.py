"""Three steps of a small uneven pipeline by any runtime; also run as one of several processes.

python -m tests.pipelines address process processes kind case count replicas schedule delay late
out.npz
"""

import ast
import functools
import operator
import signal
import sys
import time
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxmp import boundary, exchange, parse
from jaxmp.exchange import over
from jaxmp.feedback import per_microbatch
from jaxmp.net.connect import Address, connect
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.local import Local
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.placement import device_mesh, open_links, place
from jaxmp.runtimes.replicated import Replicated
from jaxmp.runtimes.schedule import place as devices_of
from jaxmp.runtimes.schedules import SCHEDULES
from jaxmp.runtimes.spmd import Spmd
from jaxmp.runtimes.types import Model
from jaxmp.runtimes.world import beside, start_jax
from jaxmp.training.across import Across
from jaxmp.training.groups import rest
from jaxmp.training.late import corrected
from jaxmp.training.parallel import RUNTIMES
from jaxmp.training.step import PER_REPLICA, Rules, create, train_step
from tests.base import QUICK

SAMPLES, STEPS, EXAMPLES = 4, 3, 70  # samples of a micro-batch
OPTIONS = tuple(QUICK.items())
ALONE = ProcessGroup()

# A pair of channels for each of the three boundaries; together all rules over both codecs.
CASES = {
    'direct': (
        'top_k(0.3) | uniform(4)',
        'uniform(4, stochastic) | ef(top_k(0.2))',
        'aqsgd(top_k(0.3), examples) | ef(same_support())',
    ),
    'ef21': (
        'ef(top_k(0.3)) | ef21(uniform(4))',
        'ef21(uniform(3)) | ef21(top_k(0.2))',
        'aqsgd(uniform(4), examples, table=8) | ef_mixed(top_k(0.2))',
    ),
    'ef_mixed': (
        'ef_mixed(top_k(0.2)) | ef(uniform(4))',
        'top_k(0.3, uniform(4)) | ef_mixed(top_k(0.3), True)',
        'random_k(0.5) | ef21(same_support(values=fp16))',
    ),
}


# With two replicas, of two stages each: every rule, most in both directions, and index reuse.
REPLICATED = {
    'direct': ('uniform(4, stochastic) | top_k(0.2)',),
    'ef21': ('ef21(top_k(0.3)) | ef21(uniform(4))',),
    'ef_mixed': ('ef_mixed(top_k(0.2)) | ef_mixed(top_k(0.3), True)',),
    'reuse': ('aqsgd(top_k(0.3), examples) | ef(same_support())',),
    'rounds': ('ef21(top_k(0.3)) | ef21(uniform(4))',),
}
ROUNDS = 'diloco(2, all_gather(ef(top_k(0.3))), fragments=2, delay=1, mix=0.5)'


UNIFORM = nn.initializers.lecun_uniform()  # compiles faster than Flax's normal one


class Layer(nn.Module):
    """A dense layer, with BatchNorm and dropout where asked."""

    width: int
    norm: bool = False
    drop: bool = False

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(self.width, param_dtype=x.dtype, kernel_init=UNIFORM)(x)
        if self.norm:
            x = nn.BatchNorm(not train, momentum=0.9, param_dtype=x.dtype, dtype=x.dtype)(x)
        x = nn.Dropout(0.2, deterministic=not (train and self.drop))(x)
        return jnp.tanh(x)


STAGES = (Layer(12, norm=True), Layer(5), Layer(16, norm=True, drop=True), Layer(4))
SHORT = (Layer(12, norm=True), Layer(4, drop=True))  # where two replicas share four devices


def loss(y, target):
    return jnp.mean((y - target) ** 2), {'size': jnp.mean(jnp.abs(y))}


def cuts(case, n, count):
    texts = CASES[case] if count > 1 else REPLICATED[case]
    pairs = [[parse(t, {'examples': EXAMPLES}) for t in p.split(' | ')] for p in texts]
    return tuple(boundary(*(per_microbatch(c, n) for c in pair)) for pair in pairs[:count])


def model(case, n, stages=STAGES):
    x = jax.ShapeDtypeStruct((SAMPLES, 9), float)
    prepare = lambda x, key: x if key is None else x + 0.1 * jax.random.normal(key, x.shape)
    return Model(stages, cuts(case, n, len(stages) - 1), prepare, loss, x, n)


def delays(late, stages):
    """Of each stage: ``late`` for all, or by stage as it says."""
    return late if isinstance(late, tuple) else (late,) * stages if late else ()


@functools.cache
def rules(case, replicas, late=0):
    """One object each, of which runs of the same network share the compiled updates."""
    text = 'all_gather(ef(top_k(0.3)))' if replicas > 1 else 'mean'
    text = ROUNDS if case == 'rounds' else text
    stages = len(STAGES if replicas == 1 else SHORT)
    steps = delays(late, stages)
    made = {n: corrected(optax.sgd(0.1, 0.9), n, 'predict(0.5)') for n in {0, *steps}}
    groups = rest(stages, made[0], exchange.parse(text))
    if steps:
        groups = tuple(g._replace(optimizer=made[n]) for g, n in zip(groups, steps, strict=True))
    return Rules(groups, 1.0, steps)


def batches(n, replicas, late=0):
    """So many that three move parameters."""
    r = np.random.default_rng(n)
    for _ in range(STEPS + max(delays(late, 1), default=0)):
        rows = SAMPLES * n * replicas
        x, y = (r.standard_normal((rows, k)) for k in (9, 4))
        yield {'x': x, 'y': y, 'id': r.permutation(EXAMPLES)[:rows].astype(np.int32)}


def flat(means):
    return np.array([means[0], means[1]['size']])


def scanned(body, carry, parts):
    """`jaxmp.runtimes.microbatch.loop` as accelerators run it: it compiles one micro-batch."""
    return jax.lax.scan(lambda carry, at: (body(carry, at), None), carry, parts)[0]


@mock.patch('jaxmp.runtimes.local.loop', scanned)
def local(case, n, replicas, late=0):
    """Means, and what a step leaves of each stage and replica, by the runtime of one program."""
    stages = STAGES if replicas == 1 else SHORT
    cut, rule, key = model(case, n, stages), rules(case, replicas, late), jax.random.key(0)
    total = lambda squares: sum(x for row in squares.values() for x in row)
    across = Across(total, lambda grads, held, key: (grads, held), together=True)
    found = []
    own = lambda via: Local(cut, via=via)
    if replicas == 1:
        state = jax.jit(lambda k: create(rule, own(None), across, k), compiler_options=QUICK)(key)
        step = jax.jit(
            lambda s, b: train_step(rule, own(None), across, (s, b)), compiler_options=QUICK
        )
        for batch in batches(n, 1, late):
            state, means = step(state, batch)
            found.append([flat(means)])
        return found, [jax.device_get(state.model)]
    mesh = Mesh(jax.devices()[:replicas], ('replica',), axis_types=(AxisType.Auto,))
    rows, frame = P('replica'), lambda tree: jax.tree.map(lambda a: a[None], tree)
    whole = functools.partial(jax.shard_map, mesh=mesh, out_specs=rows, check_vma=False)

    def first(k):
        return frame(create(rule, own(over()), across, k).replace(step=(), key=()))

    def one(state, number, k, batch):
        state = jax.tree.map(lambda a: a[0], state).replace(step=number, key=k)
        state, means = train_step(rule, own(over()), across, (state, batch))
        return frame((state.replace(step=(), key=()), means))

    state = jax.jit(whole(first, in_specs=P()), compiler_options=QUICK)(key)
    step = jax.jit(whole(one, in_specs=(rows, P(), P(), rows)), compiler_options=QUICK)
    for i, batch in enumerate(batches(n, replicas, late)):
        state, means = step(state, jnp.int32(i), key, batch)
        found.append([flat(jax.tree.map(operator.itemgetter(r), means)) for r in range(replicas)])
    at = lambda r: jax.device_get(jax.tree.map(lambda a: a[r], state.model))
    return found, [at(r) for r in range(replicas)]


def parts_of(feedback, s, links, once=False):
    """What stage s holds of the one-program runtime's states, shared ones at both ends or once."""
    ends = lambda b, way: getattr(feedback, way)[b]
    shared = lambda b, way: () if once else ends(b, way)[0]
    receiver = lambda b, way, both: shared(b, way) if both else ends(b, way)[1]
    left = right = ((), ())
    if s:
        fwd = links[s - 1].fwd
        left = receiver(s - 1, 'fwd', fwd.shared_state), ends(s - 1, 'bwd')[0]
    if s < len(links):
        bwd = links[s].bwd
        right = ends(s, 'fwd')[0], receiver(s, 'bwd', bwd.shared_state)
    return (*left, *right)


def built(kind, case, n, replicas, group=ALONE, late=0, schedule='1f1b', remat=False, **options):
    """The runtime of a kind, of this process."""
    stages = STAGES if replicas == 1 else SHORT
    steps = delays(late, len(stages))
    normed = len({*steps}) == 1  # else each group clips by its own norm
    whole = model(case, n, stages)._replace(remat=remat, normed=normed, delays=steps)
    if kind == 'local':
        return Replicated(whole, device_mesh(replica=replicas) if replicas > 1 else None)
    if kind == 'spmd':
        mesh = device_mesh(replica=replicas, stage=len(stages))
        if group.count > 1:
            open_links(mesh)
        columns = Columns(mesh.devices, OPTIONS)
        return Spmd(whole, columns, options=OPTIONS)
    plan = SCHEDULES[schedule](len(stages), n)
    homes = devices_of(plan)
    rows = place(replicas, 1 + max(homes), apart=group.count == 1, group=group)
    columns = Columns([[row[d] for d in homes] for row in rows], OPTIONS, group)
    return Mpmd(whole, columns, plan, options=OPTIONS, **options)


def run(kind, case, n, replicas, group=ALONE, late=0, **options):
    """Three steps by `built`: means, what they leave, the runtime, and the seconds of each."""
    runtime = built(kind, case, n, replicas, group, late, **options)
    return (*steps(runtime, case, n, group, late), runtime)


def steps(runtime, case, n, group=ALONE, late=0):
    """Means, what is left once nothing is under way, and the seconds of each step."""
    replicas, stages = runtime.replicas, range(runtime.last + 1)

    def total(squares):
        if runtime.together:
            return sum(x for row in squares.values() for x in row)
        mine = np.zeros((replicas, len(stages)))
        for s, rows in squares.items():
            for r in runtime.columns.here[s]:
                mine[r, s] = sum(float(row[r]) for row in rows)
        sums = jnp.sum(jnp.asarray(group.total(mine)), -1)
        return sums if replicas > 1 else sums[0]

    rule = rules(case, replicas, late)
    across = Across(total, lambda grads, held, key: (grads, held), together=runtime.together)
    key = jax.random.key(0)
    state, found, seconds = create(rule, runtime, across, key), [], []
    number, key = runtime.numbered(0, jax.random.key_data(key))
    state = state.replace(step=number, key=key)
    one = lambda runtime, *given: train_step(rule, runtime, across, given)
    step = runtime.bind(one, PER_REPLICA)
    for batch in batches(n, replicas, late):
        start = time.perf_counter()
        state, means = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - start)
        found.append([flat(m) for m in runtime.rows(means).values()] if means else None)
    _, left = runtime.drain(state.model)
    return found, left._replace(feedback=runtime.unpack(left.feedback)), seconds


def main(address, process, processes, kind, case, n, replicas, schedule, delay, late, out):
    signal.alarm(300)  # whatever becomes of the parent
    jax.config.update('jax_enable_x64', True)
    place = Address(address, int(processes), int(process))
    group = connect(place, range(int(processes)), {}, 'stage')
    if RUNTIMES[kind].joined:
        start_jax(beside(place), group)
    if kind == 'spmd':
        jax.config.update('jax_num_cpu_devices', 4 // int(processes))
    slow = {'emulated': (0.0, float(delay))} if kind == 'mpmd' else {}
    options = {'late': ast.literal_eval(late), 'schedule': schedule, **slow}
    found, state, seconds, runtime = run(kind, case, int(n), int(replicas), group, **options)
    arrays = {
        f'{name}/{s}/{r}/{i}': a
        for name, part in state._asdict().items()
        for s, rows in part.items()
        for r, tree in runtime.rows(rows).items()
        for i, a in enumerate(jax.tree.leaves(tree))
    }
    arrays['seconds'] = np.array(seconds)
    if found[0]:
        arrays['means'] = np.array(found)
    np.savez(out, **{k: np.asarray(a) for k, a in arrays.items()})
    group.close()


if __name__ == '__main__':
    main(*sys.argv[1:])
