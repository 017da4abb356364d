"""The examples run, and end with the numbers of one program."""

import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import jaxmp
from jaxmp import data
from jaxmp.plugins import module
from tests.base import ENV, ROOT
from tests.runs import LAUNCH
from tests.test_pretrained import tiny

EXAMPLES = ROOT / 'examples'
ENDING = r'[\s\S]*test: ([\d.]+)% of the images are known\nforward: (\S+) bytes .*\nback: (\S+) by'
FWD, BWD = 'ef(top_k(0.2))', 'ef21(same_support())'  # states at all ends, and reuse of the indices


def ran(*command):
    """What a command prints, which ends well."""
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def alone(mpmd, epochs):
    """The loss of each epoch and the hits of the test, by the same network in one program."""
    cut, digits = jaxmp.boundary(jaxmp.parse(FWD), jaxmp.parse(BWD)), data.load('digits')
    params = [mpmd.start(cut, process).params for process in (0, 1)]

    def loss(params, feedback, batch, ctx):
        h, feedback = cut.cross(mpmd.FRONT.apply(params[0], batch['x']), feedback, ctx)
        logits = mpmd.BACK.apply(params[1], h)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch['y'])
        return nats.mean(), (feedback, (logits.argmax(-1) == batch['y']).sum())

    @jax.jit
    def step(params, slots, feedback, batch, number):
        ctx = jaxmp.Ctx(jax.random.fold_in(jax.random.key(mpmd.SEED), number), batch['id'])
        (nats, _), grads, feedback = jaxmp.value_and_grad(loss)(params, feedback, batch, ctx)
        updates, slots = mpmd.OPTIMIZER.update(grads, slots)
        return optax.apply_updates(params, updates), slots, feedback, nats

    slots, feedback, losses = mpmd.OPTIMIZER.init(params), cut.init(mpmd.H), []
    for epoch in range(epochs):
        order = data.order(mpmd.SEED, epoch, len(digits.train.y))
        for batch in data.batches(digits.train, mpmd.BATCH, order):
            args = params, slots, feedback, batch, len(losses) + 1
            params, slots, feedback, nats = step(*args)
            losses.append(nats)
    tested, fresh = jax.jit(loss), cut.init(mpmd.H)
    tests = data.batches(digits.test, mpmd.BATCH)
    hits = sum(tested(params, fresh, b, jaxmp.Ctx(ids=b['id']))[1][1] for b in tests)
    return np.reshape(losses, (epochs, -1)).mean(1), int(hits), cut.bits(mpmd.H)


@pytest.mark.slow
def test_two_processes_end_with_the_numbers_of_one():
    script = str(EXAMPLES / 'mpmd.py')
    out = ran(*LAUNCH, sys.executable, script, '--epochs=2', f'--fwd={FWD}', f'--bwd={BWD}')
    losses = [float(x) for x in re.findall(r'^epoch \d: loss (\S+)$', out, re.MULTILINE)]
    known, *sizes = re.fullmatch(ENDING + r'.*\n', out).groups()
    wanted, hits, bits = alone(module(script), 2)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert float(known) == pytest.approx(100 * hits / 360, abs=0.005)
    assert [8 * int(size.replace(',', '')) for size in sizes] == list(bits)


def test_mpmd_says_how_it_is_started(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['mpmd.py'])
    with pytest.raises(SystemExit):
        module(str(EXAMPLES / 'mpmd.py')).main()
    assert 'start it as: jaxmp launch --processes 2 -- python' in capsys.readouterr().err


@pytest.fixture
def finetuned(tmp_path, monkeypatch, capsys):
    """What the fine-tuning of a tiny decoder of bytes prints."""
    folder = str(tiny(tmp_path / 'model'))
    monkeypatch.setattr(sys, 'argv', [
        'finetune.py', folder, '--tokenizer=bytes', '--length=128', '--steps=40', '--rate=0.03',
        '--fwd=ef(uniform(2))',
    ])  # fmt: skip
    module(str(EXAMPLES / 'finetune.py')).main()
    return capsys.readouterr().out


def test_finetuning_learns_and_says_its_loss_and_bytes(finetuned):
    steps = [float(x) for x in re.findall(r'^step \d+: (\S+) nats', finetuned, re.MULTILINE)]
    open_, compressed = map(float, re.findall(r'compression: (\S+) nats', finetuned))
    assert len(steps) == 40
    assert steps[0] == pytest.approx(np.log(256), abs=0.1)
    assert max(open_, compressed) < np.log(256) - 0.2
    assert 0 < abs(compressed - open_) < 0.2
    rows = re.findall(r'boundary: (\S+) bytes forward and (\S+) back, (\S+) in', finetuned)
    sizes = np.array([[int(n.replace(',', '')) for n in row] for row in rows])
    assert sizes[:, 2].tolist() == [4 * 4 * 128 * 16] * 2  # float32, batch, tokens, width
    assert (sizes[:, :2] < sizes[:, 2:] / 5).all()


def test_finetuning_leaves_the_token_table(tmp_path):
    """Two stages have it, and would move it apart."""
    example = module(str(EXAMPLES / 'finetune.py'))
    model = example.open_language_model(str(tiny(tmp_path)), stages=3, tokenizer='bytes')
    tables = jax.tree.map_with_path(example.is_table, model.variables)
    flat = flatten_dict(dict(enumerate(tables)))
    assert {path for path, is_table in flat.items() if is_table} == {
        (stage, 'params', 'embed_tokens', 'weight') for stage in (0, 2)
    }
