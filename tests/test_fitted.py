"""Components of a file: coded token by token, learned from activations and gradients, refused."""

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import lax
from jaxmp.codecs import rans, rows
from jaxmp.codecs.components import opened, write
from jaxmp.codecs.fitted import codec_of
from jaxmp.training import loop
from jaxmp.training.evaluation import crosstest, fit
from jaxmp.training.evaluation.components import in_bits, learned
from jaxmp.training.generation import generate
from jaxmp.training.workdir.locks import WorkdirError
from tests.base import ROOT
from tests.test_pretrained import small, tiny

CTX = jaxmp.Ctx()
C = 32


def activations(seed, tokens=2048, loud=True):
    """Correlated channels, two of them large, tokens of unlike loudness and some of one kind."""
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(7).normal(size=(C, C)) * 2.0 ** (-np.arange(C) / 4)[:, None]
    x = rng.standard_t(6, size=(tokens, C)) @ mix * np.exp(rng.normal(size=(tokens, 1)) / 3)
    x[:, 3] *= 30
    if loud:
        x[::64] = 1000 * np.cos(np.arange(C)) + x[::64]
    return x.astype(np.float32)


def gradients(seed, tokens=2048):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(tokens, C)) * 2.0 ** -(np.arange(C) % 5)).astype(np.float32)


@pytest.fixture(scope='module')
def directions():
    return learned(activations(0), gradients(1), 0.9)


@pytest.fixture
def file(tmp_path, directions):
    cuts = {2: in_bits(directions, 6), 5: in_bits(directions, 4)}
    write(tmp_path / 'c.npz', {'model': 'm', 'bits': 4}, cuts)
    return tmp_path / 'c.npz'


def error(codec, x):
    y = codec.decode(codec.encode(x, CTX), jaxmp.like(x), CTX)
    return np.asarray(y - x)


@pytest.mark.parametrize('sizes', [[0.05] * 40, [1.0, 8.0, 30.0] * 9, [0.01, 30.0]])
def test_rows_come_back_and_cost_what_is_said(sizes):
    table = np.asarray(rans.table_of(jnp.asarray(sizes)))
    rng = np.random.default_rng(0)
    numbers = np.round(rng.logistic(size=(50, len(sizes))) * np.asarray(sizes) / (2 * np.log(2)))
    most = rows.largest()[table]
    numbers = np.clip(numbers, -most, most).astype(np.int32)
    stream, used = rows.encode(jnp.asarray(numbers), table, 60)
    assert np.array_equal(rows.decode(stream, table), numbers)
    cost = np.asarray(rows.cost(jnp.asarray(numbers, jnp.float32), table))
    share = -np.log2(rans.tables().frequency[table, numbers + rans.LARGEST] / 4096).sum(1)
    assert np.all(cost > share - 1 - 0.05 * share)
    assert np.median(cost - share) < 1 + 0.05 * np.median(share)
    assert np.all(16 * np.asarray(used) <= share + 16)


def test_a_row_cut_off_says_so():
    table = np.full(40, 30, np.uint8)
    numbers = jnp.arange(80).reshape(2, 40) % 50
    assert np.all(rows.encode(numbers, table, 3)[1] > 3)


def test_error_falls_by_four_for_a_bit(directions):
    x, g = jnp.asarray(activations(2)), gradients(3)
    lost = [
        float(np.sum((error(codec_of(in_bits(directions, b)), x) * g) ** 2)) for b in (4, 5, 6, 7)
    ]
    ratios = np.array(lost[:-1]) / lost[1:]
    assert np.all(ratios > 2.5), ratios
    assert np.all(ratios[1:] < 6), ratios  # at four bits a step and a state are most


def test_a_message_has_its_bits(directions):
    c = in_bits(directions, 5)
    x = jnp.asarray(activations(4, 64).reshape(4, 16, C))
    message = codec_of(c).encode(x, CTX)
    assert message.shape == (4, 16 * c.words)
    assert 16 * c.words <= 5 * C


def test_a_token_needs_no_other(directions):
    codec = codec_of(in_bits(directions, 5))
    x = jnp.asarray(activations(5, 64).reshape(2, 32, C))
    whole = codec.decode(codec.encode(x, CTX), jaxmp.like(x), CTX)
    for at in (0, 7, 31):
        one = x[:, at : at + 1]
        alone = codec.decode(codec.encode(one, CTX), jaxmp.like(one), CTX)
        apart = np.linalg.norm(alone[:, 0] - whole[:, at])  # products in another order
        assert apart < 0.2 * np.linalg.norm(whole[:, at] - x[:, at])


def test_gradients_count(directions):
    x, g = jnp.asarray(activations(6)), gradients(7)
    even = learned(activations(0), gradients(1), 0.0)
    lost = [float(np.sum((error(codec_of(in_bits(d, 5)), x) * g) ** 2)) for d in (directions, even)]
    assert lost[0] < 0.8 * lost[1]


def test_loud_tokens_have_means(directions):
    assert len(directions.means) == 4
    assert np.linalg.norm(directions.means[1:], axis=1).max() > 1000
    x = activations(8)
    lost = error(codec_of(in_bits(directions, 5)), jnp.asarray(x))
    norms = np.linalg.norm(lost, axis=1) / np.linalg.norm(x, axis=1)
    assert np.median(norms[::64]) < 0.1


@pytest.mark.parametrize('scale', [1e-30, 1e-3, 1e10, 1e30])
def test_any_size_is_sent(directions, scale):
    x = activations(9, 64, loud=False)
    mean = directions.means[0]
    x = jnp.asarray(mean * (scale < 1) + x * scale, jnp.float32)
    lost = error(codec_of(in_bits(directions, 6)), x).astype(float)
    assert np.isfinite(lost).all()
    assert np.linalg.norm(lost) < 0.5 * np.linalg.norm(np.asarray(x, float))


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_what_is_not_finite_arrives_so(directions, bad):
    x = jnp.asarray(activations(10, 64)).at[5, 2].set(bad)
    lost = error(codec_of(in_bits(directions, 5)), x)
    assert np.isnan(lost[5]).all()
    assert np.isfinite(np.delete(lost, 5, 0)).all()


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float64'])
def test_dtypes(directions, dtype):
    with jax.enable_x64(dtype == 'float64'):
        x = jnp.asarray(activations(11, 64, loud=False) / 100, dtype)
        codec = codec_of(in_bits(directions, 6))
        y = codec.decode(codec.encode(x, CTX), jaxmp.like(x), CTX)
        assert y.dtype == x.dtype


def test_the_word_reads_the_file(file):
    x = jnp.asarray(activations(12, 64))
    channel = jaxmp.parse(f"fitted('{file}', 5)")
    assert str(channel) == f"fitted('{file}', 5)"
    assert channel == jaxmp.parse(str(channel))
    assert jaxmp.bits(channel, x) <= 4 * x.size
    assert np.linalg.norm(error(channel.codec, x)) < np.linalg.norm(x)


@pytest.mark.parametrize('check_vma', [True, False])
def test_it_is_a_word_of_a_collective(file, check_vma):
    x, P = activations(13, 64).reshape(2, 32, C), jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ('i',), axis_types=(jax.sharding.AxisType.Auto,))
    swap = lambda x: lax.ppermute(x, 'i', [(0, 1), (1, 0)], fwd=f"fitted('{file}', 2)")
    specs = {'in_specs': P('i'), 'out_specs': P('i'), 'check_vma': check_vma}
    y = jax.jit(jax.shard_map(swap, mesh=mesh, **specs))(jnp.asarray(x))[::-1]
    alone = jaxmp.parse(f"fitted('{file}', 2)").codec
    apart = np.linalg.norm(y - x - error(alone, jnp.asarray(x)))
    assert apart < 0.2 * np.linalg.norm(error(alone, jnp.asarray(x)))


def changed(file, **arrays):
    with np.load(file) as old:
        np.savez(file, **{**old, **arrays})


def about(file, **values):
    with np.load(file) as old:
        return np.array(json.dumps(json.loads(str(old['about'])) | values))


def test_what_cannot_be_read_is_refused(file, tmp_path):
    read = lambda cut=5, at=file: jaxmp.parse(f"fitted('{at}', {cut})")
    with pytest.raises(ValueError, match='boundaries behind 2, 5 blocks, and none behind 3'):
        read(3)
    with pytest.raises(ValueError, match=r'there is no file .* jaxmp fit'):
        read(at=tmp_path / 'none.npz')
    with pytest.raises(ValueError, match='is of 32 channels, and the tensor has 8'):
        jaxmp.bits(read(), jnp.zeros((2, 8)))
    with pytest.raises(ValueError, match='no text'):
        jaxmp.parse('fitted(3, 5)')
    before = file.read_bytes()
    for wrong, says in (
        ({'extra': np.zeros(3)}, 'extra, which is not known'),
        ({'about': about(file, format='other')}, "the format 'other'"),
        ({'5.means': np.zeros((2, 3), np.float32)}, r'5.means is float32\[2, 3\]'),
        ({'5.sizes': np.full(C, np.nan, np.float32)}, 'not finite'),
        ({'5.table': np.full(C, 200, np.uint8)}, 'cannot be'),
    ):
        file.write_bytes(before)
        changed(file, **wrong)
        with pytest.raises(ValueError, match=says):
            read()
    file.write_bytes(b'no archive')
    with pytest.raises(ValueError, match='no file of components'):
        read()


def test_too_few_tokens_or_bits(directions):
    with pytest.raises(ValueError, match='20 tokens are not enough for 32 channels'):
        learned(activations(0, 20), gradients(1, 20), 0.5)
    with pytest.raises(ValueError, match="no room for a token's step"):
        in_bits(directions, 1)


@pytest.fixture(scope='module')
def fit_of(tmp_path_factory):
    """A tiny decoder, a text, and what the command says of its three stages."""
    folder = tiny(tmp_path_factory.mktemp('tiny'), num_hidden_layers=3, hidden_size=64)
    text = tmp_path_factory.mktemp('text') / 'alice.txt'
    text.write_text((ROOT / 'jaxmp/data/alice.txt').read_text()[:12_000])
    out = text.with_name('codec.npz')
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        fit.main([
            str(folder), f'--text={text}', '--tokenizer=bytes', '--block=32', '--cuts=1 2',
            '--bits=5', '--tokens=4096', f'--out={out}',
        ])  # fmt: skip
    return folder, text, out, shown.getvalue()


def test_the_command_learns_and_tests(fit_of):
    _, _, out, shown = fit_of
    assert f"""--config.fwd="fitted('{out}', 1); fitted('{out}', 2)\"""" in shown
    said, cuts = opened(str(out))
    assert [*cuts] == [1, 2]
    assert said['bits'] == 5
    assert said['text'] == ['alice.txt']
    assert said['tokens'] == 3264  # four blocks of five


@pytest.mark.slow
def test_a_file_serves_in_a_test(fit_of, tmp_path, capsys):
    folder, text, out, _ = fit_of
    channels = f"fitted('{out}', 1);fitted('{out}', 2)"
    crosstest.main([
        str(folder), f'--text={text}', '--tokenizer=bytes', '--block=32', '--tokens=1024',
        '--cuts=1 2', '--codec', channels, f'--out={tmp_path / "s.png"}',
    ])  # fmt: skip
    capsys.readouterr()
    scores = json.loads((tmp_path / 's.json').read_text())['scores'][folder.name]
    assert scores[channels]['bits'] == pytest.approx(5, abs=0.3)
    assert scores[channels]['kl'] < 0.1


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_components(fit_of, tmp_path):
    folder, _, out, _ = fit_of
    own = tmp_path / 'own.npz'
    own.write_bytes(out.read_bytes())
    channels = f"fitted('{own}', 1);fitted('{own}', 2)"
    config = small(folder, cuts='1 2', train='lora(2)', fwd=channels, epochs=1)
    run = lambda: loop.train_and_evaluate(config, tmp_path / 'run', quiet=True, draw=False)
    run()
    config.epochs = 2
    changed(own, **{'1.sizes': np.load(own)['1.sizes'] * 2})
    with pytest.raises(WorkdirError, match=r'other data or weights: fitted own\.npz'):
        run()


@pytest.mark.slow
def test_the_fewest_bits_within_a_percentage(fit_of):
    folder, text, out, _ = fit_of
    out = out.with_name('percent.npz')
    other = text.with_name('other.txt')
    other.write_text((ROOT / 'jaxmp/data/alice.txt').read_text()[20_000:30_000])
    words = [str(folder), '--text', str(text), str(other), '--tokenizer=bytes', '--block=32']
    words += ['--cuts=1 2']
    fit.main([*words, '--percent=5', '--tokens=4096', f'--out={out}'])
    about = opened(str(out))[0]
    assert about['predicted_kl'] < 0.05
    assert about['text'] == ['alice.txt', 'other.txt']
    with pytest.raises(SystemExit, match=r'8 bits are predicted to add .* --percent=1e-12 is less'):
        fit.main([*words, '--percent=1e-12', '--tokens=4096', f'--out={out}'])


@pytest.mark.parametrize(('words', 'says'), [
    (['--bits=0'], 'give bits above 0'),
    (['--bits=9'], 'at most 8'),
    (['--bits=4', '--out=c.safetensors'], r'ends in \.npz'),
    (['--bits=4', '--out=nowhere/c.npz'], 'a folder that is there'),
    (['--bits=4', '--cuts=1 9'], 'block'),
    (['--bits=4', '--tokens=64', '--block=32'], 'not enough|blocks'),
])  # fmt: skip
def test_wrong_arguments_are_told_in_a_line(fit_of, words, says, monkeypatch, tmp_path):
    folder, text, _, _ = fit_of
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f'(?s)jaxmp fit: .*({says})'):
        fit.main([str(folder), f'--text={text}', '--tokenizer=bytes', *words])


@pytest.mark.slow
def test_a_text_is_written_through_components(fit_of, capsys):
    """A token at a time behind each boundary's own; as many channels as boundaries."""
    folder, _, out, _ = fit_of
    words = [str(folder), '--tokenizer=bytes', '--cuts=1 2', '--tokens=8', '--prompt=Alice ']
    generate.main([*words, '--codec', f"fitted('{out}', 1);fitted('{out}', 2)"])
    assert capsys.readouterr().out.startswith('Alice ')
    with pytest.raises(SystemExit, match='3 channels and the model 2 boundaries'):
        generate.main([*words, '--codec=fp16;fp16;fp16'])
