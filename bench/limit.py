r"""The rate-distortion limit of the nats table: how few nats so many bits can lose, at three cuts.

Where a message has the error e, a language model loses about ``1/2 e^T F e`` nats, F the covariance
of the gradients of a token. Of what heavy tokens and channels leave, with the covariance S, reverse
water-filling over the eigenvalues l of ``F^(1/2) S F^(1/2)`` gives the least bits for such a loss:

    bits = sum max(0, 1/2 log2(l / w)) / C,   nats = 1/2 sum min(w, l)

with one w for all cuts, since nats add. F and S are of the text to learn from, the spectrum and the
errors of the text that is scored. Beside the limit stand the nats that real messages of `klt` lose,
predicted from their errors and measured, with books made of F and S as the limit has them.

Run: python bench/limit.py FILE.gguf --text=wiki.test.raw --before=wiki.train.tokens --work=FOLDER
         [--tokens=12288] [--rows=12288] [--out=RESULT.json]
FOLDER keeps what stands before the first boundary, as for `python -m study nats`.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.boundary.pipeline import run_stage
from jaxmp.codecs.heavy import Heavy, taken
from jaxmp.codecs.microscaling import mx
from jaxmp.feedback.components import best_widths
from jaxmp.spec import parse
from jaxmp.training.evaluation.perplexity import blocks_of
from jaxmp.training.summary import provenance
from jaxmp.wire import Ctx, like
from study import nats as nats_table

CUTS = 8, 16, 23
HEAVY = 4, 1, 1  # tokens by cut, as in configs/pretrained_codecs.py
UNEVEN = -0.08, -0.04, 0.12  # bits by cut in the table
APART = {1: 0.08, 4: 0.18}  # bits of so many heavy tokens, of two channels and of all else
BARS = 4.3, 3, 2.3, 1.3, 0.7
TRIES = (
    '2.3:even:0.3 2.3:table:0.3 2.3:best:0.3 2.3:best:0.9 1.3:table:0.3 1.3:best:0.3 1.3:best:0.9'
)


def rest_of(x, cut):
    """What heavy tokens and channels leave at a cut, and which tokens are not heavy."""
    message, rest = taken(x, Heavy(HEAVY[cut], 2, False, mx(8)), Ctx(jax.random.key(0)))
    light = (
        jnp.ones(x.shape[:2]).at[jnp.arange(len(x))[:, None], message['tokens'].astype(int)].set(0)
    )
    return rest, light


def behind(model):
    """``(variables, x, errors, tokens) -> (nats per token of each block, what crosses)``."""

    def run(variables, x, errors, ctx):
        crossed = []
        for stage, own, error in zip(model.stages[1:], variables, errors, strict=True):
            crossed.append(x)
            x = run_stage(stage, own, x + error, ctx, {'train': False})[0]
        return x[:, :-1, 0], crossed

    return run


def moments(model, setting, file, tokens):
    """Covariances of rests and of gradients, by cut."""
    blocks = blocks_of(model, file, 256, tokens, 8)
    run, variables = behind(model), model.variables[1:]

    @jax.jit
    def of_batch(x, ctx):
        zeros = [jnp.zeros_like(x)] * len(CUTS)

        def total(errors):
            nats, crossed = run(variables, x, errors, ctx)
            return nats.sum(), crossed

        grads, crossed = jax.grad(total, has_aux=True)(zeros)
        found = []
        for cut, (g, a) in enumerate(zip(grads, crossed, strict=True)):
            rest, light = rest_of(a, cut)
            rows, g = rest.reshape(-1, a.shape[-1]), (g * light[..., None]).reshape(-1, a.shape[-1])
            rows = rows - rows.mean(0)
            found.append((rows.T @ rows / len(rows), g.T @ g / light.sum()))
        return found

    arrivals = nats_table.arrivals(model, blocks, setting, CUTS, 'matrices')
    found = [jax.tree.map(np.asarray, of_batch(x, ctx)) for ctx, x in arrivals]
    sums = functools.reduce(functools.partial(jax.tree.map, np.add), found)
    return [[np.asarray(a, np.float64) / len(found) for a in pair] for pair in sums]


def root_of(F, share):
    """The root of ``(1 - share) I + share F``, F of mean eigenvalue 1, and its inverse."""
    values, vectors = np.linalg.eigh(F / np.trace(F) * len(F))
    root = np.sqrt(1 - share + share * np.maximum(values, 1e-6))
    return vectors * root @ vectors.T, vectors / root @ vectors.T


def spectrum(F, S):
    """The eigenvalues of ``F^(1/2) S F^(1/2)``, in nats."""
    values, vectors = np.linalg.eigh(F)
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    return np.maximum(np.linalg.eigvalsh(root @ S @ root), 1e-18)


def filled(spectra, water):
    """Bits per element and nats of each cut."""
    bits = [np.maximum(0, np.log2(l / water) / 2).sum() / len(l) for l in spectra]
    return np.array(bits), np.array([np.minimum(l, water).sum() / 2 for l in spectra])


def at_bits(spectra, bits, apart):
    """The water level at which the mean of the cuts has so many bits in all."""
    low, high = 1e-16, 1e3
    for _ in range(200):
        middle = np.sqrt(low * high)
        low, high = (
            (middle, high) if filled(spectra, middle)[0].mean() + apart > bits else (low, middle)
        )
    return high


def learned_limit(learned, scored, bits, apart):
    """Bits and nats by cut, on new text, of components that were learned from other text.

    An ideal coder of each component, whose noise has the level that the water asks for.
    """
    spectra, costs = [], []
    for (S, F), (new_S, new_F) in zip(learned, scored, strict=True):
        root, back = root_of(F, 0.99)
        vectors = np.linalg.eigh(root @ S @ root)[1]
        spectra.append(np.maximum(np.diag(vectors.T @ root @ new_S @ root @ vectors), 1e-18))
        costs.append(np.diag(vectors.T @ back @ new_F @ back @ vectors) / 2)
    water = [at_bits(spectra, bits, apart)] * 3
    noise = [np.minimum(l, w) for l, w in zip(spectra, water, strict=True)]
    return [float((c * n).sum()) for c, n in zip(costs, noise, strict=True)]


def book_of(F, S, bits, share):
    """The state of both ends of a fixed klt, whose components are those of F and S."""
    root, back = root_of(F, share)
    values, vectors = np.linalg.eigh(root @ S @ root)
    widths = best_widths(jnp.asarray(np.maximum(values, 0), jnp.float32), min(bits, 5))
    book = jnp.concatenate([widths[None], jnp.asarray(vectors.T @ back, jnp.float32)])
    return jnp.asarray(book, jnp.bfloat16).astype(jnp.float32)


def channel_of(bits, cut, more):
    """The channel of so many bits in all."""
    own = bits - APART[HEAVY[cut]]
    return parse(
        f'outliers(klt({own:.3f}, refresh=16, entropy=True, fixed=True, by_gradient=0.3{more}), '
        f'tokens={HEAVY[cut]}, channels=2, scaled=False)'
    )


def scorer(model, F, bits, books, more):
    """``(x, ctx) -> (nats by block, predicted nats by cut)`` of three channels, and their state."""
    channels = [channel_of(b, cut, more) for cut, b in enumerate(bits)]
    states = []
    for channel, book in zip(channels, books, strict=True):
        tx, rx = channel.init(jax.ShapeDtypeStruct((8, 256, book.shape[1]), jnp.float32))
        known = rx._replace(book=book)
        inverse = jnp.asarray(np.linalg.inv(np.asarray(book[1:], np.float64).T), jnp.float32)
        states.append((tx._replace(known=known, inverse=inverse), known))
    weights = [jnp.asarray(f, jnp.float32) for f in F]

    @jax.jit
    def run(variables, x, ctx, states):
        predicted = []
        for cut, (stage, own) in enumerate(zip(model.stages[1:], variables, strict=True)):
            tx, rx = states[cut]
            here = ctx.fold(cut)
            message, _ = channels[cut].send(x, tx, here)
            y, _ = channels[cut].recv(message, rx, like(x), here)
            _, light = rest_of(x, cut)
            e = ((y - x) * light[..., None]).reshape(-1, x.shape[-1])
            predicted.append(jnp.sum((e @ weights[cut]) * e) / 2 / light.sum())
            x = run_stage(stage, own, y, ctx, {'train': False})[0]
        return x[:, :-1, 0].mean(1), jnp.stack(predicted)

    return lambda x, ctx: run(model.variables[1:], x, ctx, states)


def limits(learned, scored):
    """A row of limits per bar."""
    spectra = [spectrum(f, s) for s, f in scored]
    alike = [spectrum(np.eye(len(f)) * np.trace(f) / len(f), s) for s, f in scored]
    apart = np.mean([APART[h] for h in HEAVY])
    for bits in BARS:
        by_cut, nats = filled(spectra, at_bits(spectra, bits, apart))
        single = at_bits(spectra[1:2], bits, APART[1])
        yield {
            'bits': bits,
            'limit_three_cuts': round(float(nats.sum()), 5),
            'limit_one_cut': round(float(filled(spectra[1:2], single)[1].sum()), 5),
            'bits_by_cut': np.round(by_cut + [APART[h] for h in HEAVY], 3).tolist(),
            'where_all_errors_cost_alike': round(
                float(filled(alike, at_bits(alike, bits, apart))[1].sum()), 5
            ),
            'components_of_the_learned_text': round(
                sum(learned_limit(learned, scored, bits, apart)), 5
            ),
        }


def tried(model, learned, text):
    """The bits by cut of a try, and what sends its messages."""
    bits, split, share, *more = text.split(':')
    bits, share, (S, F) = float(bits), float(share), learned.swapaxes(0, 1)
    spectra = [spectrum(f, s) for f, s in zip(F, S, strict=True)]
    apart = [APART[h] for h in HEAVY]
    best = filled(spectra, at_bits(spectra, bits, np.mean(apart)))[0] + apart
    by_cut = {'even': [bits] * 3, 'table': np.add(UNEVEN, bits).tolist(), 'best': best.tolist()}
    books = [book_of(f, s, bits, share) for f, s in zip(F, S, strict=True)]
    return by_cut[split], scorer(model, F, by_cut[split], books, ''.join(f', {m}' for m in more))


def score(model, blocks, setting, runs):
    """A row per try: predicted and measured nats."""
    plain = jax.jit(lambda v, x, ctx: behind(model)(v, x, [jnp.zeros_like(x)] * 3, ctx)[0].mean(1))
    base, nats, predicted = [], {t: [] for t in runs}, {t: [] for t in runs}
    for ctx, x in nats_table.arrivals(model, blocks, setting, CUTS, 'tries'):
        base.append(np.asarray(plain(model.variables[1:], x, ctx)))
        for text, (_, run) in runs.items():
            for parts, part in zip((nats, predicted), run(x, ctx), strict=True):
                parts[text].append(np.asarray(part))
    for text, (by_cut, _) in runs.items():
        lost = np.concatenate(nats[text]) - np.concatenate(base)
        by_order = np.mean(predicted[text], 0)
        bits, split, share, *more = text.split(':')
        yield {
            'bits': float(bits), 'split': split, 'by_gradient': float(share), 'more': more,
            'bits_by_cut': np.round(by_cut, 3).tolist(),
            'predicted_by_cut': np.round(by_order.astype(float), 4).tolist(),
            'predicted': round(float(by_order.sum()), 4), 'measured': round(float(lost.mean()), 4),
            'standard_error': round(float(lost.std(ddof=1) / len(lost) ** 0.5), 4),
        }  # fmt: skip


def told(rows):
    """The rows, each printed as it comes."""
    return [print(json.dumps(row), flush=True) or row for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('file')
    for name in ('text', 'before', 'work'):
        parser.add_argument(f'--{name}', type=Path, required=True)
    parser.add_argument('--tokens', type=int, default=12_288, help='to learn covariances from')
    parser.add_argument('--rows', type=int, default=6_144, help='tokens that are scored')
    parser.add_argument('--tries', default=TRIES, help='bits:split:by_gradient[:middle=True]')
    parser.add_argument('--known', type=Path, help='covariances of an earlier run, or for a later')
    parser.add_argument('--out', type=Path)
    a = parser.parse_args()
    setting = nats_table.Setting('limit', a.file, '', a.text, a.before, 256, 8, a.work)
    model = nats_table.opened(a.file, '', CUTS)
    if a.known and a.known.is_file():
        learned, scored = (np.load(a.known)[name] for name in ('learned', 'scored'))
    else:
        learned, scored = (
            np.array(moments(model, setting, text, count))
            for text, count in ((a.before, a.tokens), (a.text, a.rows))
        )
        if a.known:
            np.savez(a.known, learned=learned, scored=scored)
    rows = told(limits(learned, scored))
    runs = {text: tried(model, learned, text) for text in a.tries.split()}
    tries = told(score(model, blocks_of(model, a.text, 256, a.rows, 8), setting, runs))
    result = {'learned_tokens': a.tokens, 'scored_tokens': a.rows, 'cuts': CUTS, 'limits': rows}
    if a.out:
        a.out.write_text(json.dumps({**result, 'tries': tries, **provenance()}, indent=1) + '\n')


if __name__ == '__main__':
    main()
