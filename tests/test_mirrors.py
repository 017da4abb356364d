"""Both ends of a boundary remember alike, and if not, a line says where and they do again."""

import re
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import Ctx, boundary, feedback, like, parse
from jaxmp.launch.__main__ import free_port
from jaxmp.net import connect
from jaxmp.runtimes import mirrors
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.placement import Elsewhere
from jaxmp.runtimes.state import Feedback
from jaxmp.runtimes.types import ByReplica
from jaxmp.training import loop
from tests.base import ENV, slow
from tests.runs import SMALL, command, config_of, records

X = (8, 3, 6)
CTX = Ctx(jax.random.key(0), ids=jnp.arange(8), tokens=jnp.arange(24).reshape(8, 3), microbatch=0)
RULES = [
    'ef21(uniform(2))',
    'ef21(top_k(0.3))',
    'aqsgd(uniform(4), 8)',
    'aqsgd(uniform(4), 8, table=8)',
    'anchored(block(3, 32), 24, window=4)',
    'klt(1.5, refresh=3)',
    'klt(1.5, refresh=3, entropy=True)',
    'outliers(klt(1.5, refresh=3), tokens=1, channels=1)',
]


def crossed(channel, count):
    """Both ends' states after some messages, computed by two programs."""
    send = jax.jit(channel.send)
    recv = jax.jit(lambda m, rx: channel.recv(m, rx, like(jnp.zeros(X)), CTX))
    tx, rx = channel.init(like(jnp.zeros(X)))
    for i in range(count):
        yield tx, rx
        x = jax.random.normal(jax.random.key(i), X) * jnp.arange(1.0, 7.0)
        m, tx = send(x, tx, CTX)
        _, rx = recv(m, rx)
    yield tx, rx


@pytest.mark.parametrize('text', slow(RULES, lambda text: 'uniform' in text))
def test_the_sender_knows_what_the_receiver_remembers(text):
    """With a state per micro-batch, as runs have them; also in the middle of a basis of klt."""
    channel = feedback.per_microbatch(parse(text), 2)
    for tx, rx in crossed(channel, 5):
        known = channel.mirrored(tx)
        assert jax.tree.structure(known) == jax.tree.structure(rx)
        jax.tree.map(np.testing.assert_array_equal, known, rx)


def test_rules_without_a_mirror_say_so():
    assert parse('ef(uniform(2))').mirrored is None
    assert parse('raw').mirrored is None


def at_both(groups, call):
    """``call(group)`` of two processes that wait for each other, in threads of this one."""
    found, errors = [None, None], []

    def run(i):
        try:
            found[i] = call(groups[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not errors, errors
    return found


@pytest.mark.parametrize('text', ['ef21(uniform(2))', 'klt(1.5, refresh=3)'])
def test_ends_that_have_parted_are_named_and_alike_again(text):
    """A number of the receiver changes, of the second of two micro-batches."""
    channel, device = feedback.per_microbatch(parse(text), 2), jax.devices()[0]
    cuts = (boundary(channel, parse('ef(uniform(4))')),)
    *_, (tx, rx) = crossed(channel, 4)
    changed = jax.tree.map(lambda a: a.at[(1,) * a.ndim].add(1), rx)
    places = [[[device, Elsewhere(1)]], [[Elsewhere(0), device]]]
    for theirs, parted in ((rx, False), (changed, True)):
        ends = [{0: ByReplica({0: Feedback(right_tx=tx)})}, {1: ByReplica({0: Feedback(theirs)})}]
        said = [[], []]

        def call(group, ends=ends, said=said):
            i = group.index
            columns = Columns(places[i], group=group)
            return mirrors.compared(cuts, columns, ends[i], 300, said[i].append)

        with connect.processes(2) as groups:
            first, second = at_both(groups, call)
        assert first == ends[0] if not parted else first[0][0].right_tx is tx
        jax.tree.map(np.testing.assert_array_equal, second[1][0].left_rx, rx)
        assert said[0] == said[1]
        assert len(said[0]) == parted
        for line in said[0]:
            assert line.startswith('boundary 1 forward: after step 300 its two ends remember diff')


def test_a_run_compares_its_ends(monkeypatch):
    """Every second step here; a number changes in the memory of the receiver after the third."""
    monkeypatch.setattr(mirrors, 'EVERY', 2)
    changes = {**SMALL, 'model': 'lenet', 'runtime': 'mpmd', 'num_microbatches': 2}
    config, said = config_of(**changes, fwd='ef21(uniform(2))', bwd='ef21(uniform(4))'), []

    def call(group):
        trainer = loop.prepare(config, group)
        trainer.say = said.append if group.index == 0 else str
        state, heard = trainer.create(), []
        for steps in (3, 1):
            for after, *_ in trainer.epoch(0, state, np.arange(32 * steps)):
                state = after
            heard.append(list(said))
            if group.index == 1 and steps == 3:
                own = state.model.feedback[1][0]
                own = own._replace(left_rx=own.left_rx.at[0].add(1e-3))
                state.model.feedback[1][0] = own
        return heard, state.model.feedback[group.index][0]

    with connect.processes(2) as groups:
        (heard, first), (_, second) = at_both(groups, call)
    assert heard[0] == []
    [line] = heard[1]
    assert line.startswith('boundary 1 forward: after step 4 its two ends remember different')
    jax.tree.map(np.testing.assert_array_equal, first.right_tx, second.left_rx)
    jax.tree.map(np.testing.assert_array_equal, first.right_rx, second.left_tx)


STEPPED = """
import jax.numpy as jnp
import jaxmp
from jaxmp.wire import samples


def stepped() -> jaxmp.Codec:
    \"\"\"255 steps from the least to the largest: a product that rounds, and a sum.\"\"\"

    def encode(x, ctx):
        rows = samples(x).astype(jnp.float32)
        low = rows.min(1, keepdims=True)
        step = (rows.max(1, keepdims=True) - low) / 255 + 1e-9
        return {'codes': jnp.round((rows - low) / step).astype(jnp.uint8), 'low': low, 'step': step}

    def decode(message, like, ctx):
        values = message['codes'].astype(jnp.float32) * message['step'] + message['low']
        return values.reshape(like.shape).astype(like.dtype)

    return jaxmp.Codec(encode, decode)
"""


def unlike_ends(folder, isa, steps, **changes):
    """What two processes say, of which the second compiles for ``isa``, and their statuses."""
    changes = {
        'runtime': 'mpmd',
        'model': 'lenet',
        'num_microbatches': 2,
        'steps': steps,
        **changes,
    }
    changes |= {'eval_every': f'{steps} steps', 'checkpoint_every': f'{steps} steps'}
    place = [f'--coordinator=127.0.0.1:{free_port()}', '--processes=2', '--silent=20']
    run = [*command(folder, **changes), *place]
    flags = '', f'--xla_cpu_max_isa={isa}'
    started = [
        subprocess.Popen(
            [*run, f'--process={i}'],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**ENV, 'XLA_FLAGS': flags[i]},
        )
        for i in range(2)
    ]
    try:
        texts = [p.communicate(timeout=300)[0].decode() for p in started]
    finally:
        for p in started:
            p.kill()
    return texts, [p.returncode for p in started]


@pytest.mark.slow
def test_ends_of_which_one_has_no_fused_multiply_add_part_and_go_on(tmp_path):
    """Below AVX2 there is none: a decoder that rounds twice parts, `top_k` and `rotate` do not."""
    (tmp_path / 'stepped.py').write_text(STEPPED)
    own = {'codecs': tmp_path / 'stepped.py', 'fwd': 'ef21(stepped())', 'bwd': 'ef21(top_k(0.3))'}
    texts, codes = unlike_ends(tmp_path / 'run', 'AVX', 2 * mirrors.EVERY, **own)
    assert codes == [0, 0], texts
    said = [re.findall(r'(boundary .*): after step (\d+) its two ends remember', t) for t in texts]
    every = [('boundary 1 forward', str(k * mirrors.EVERY)) for k in (1, 2)]
    assert said[0] == every, texts
    rotated = {'fwd': 'ef21(rotate(uniform(4)))', 'bwd': 'ef21(fp16)'}
    texts, codes = unlike_ends(tmp_path / 'exact', 'AVX', mirrors.EVERY, **rotated)
    assert codes == [0, 0], texts
    assert 'its two ends remember' not in texts[0] + texts[1]
    assert records(tmp_path / 'exact')[-1]['step'] == mirrors.EVERY


@pytest.mark.slow
def test_an_end_that_cannot_compile_a_channel_is_named(tmp_path):
    """SSE4.2 has no conversions of float16: the first run of such ends stood still."""
    texts, codes = unlike_ends(tmp_path, 'SSE4_2', 100, fwd='ef21(block(4, 32))', bwd='ef21(fp16)')
    assert codes == [1, 1]
    for text in texts:
        assert 'process 1 (stage 1) computes other numbers than process 0 (stage 0), in f' in text
        assert 'JaxRuntimeError' in text
        assert 'XLA_FLAGS' in text
