"""Why a message that codes the attention sink as any other token loses less than nothing.

The rows change one thing of what crosses after block 16 of SmolLM2-135M: the first token of each
block by itself (its norm scaled; as the codec of `klt2.3-no-sink` decodes it), all others by
themselves, or both. Nothing else is compressed. Each row is run on blocks of WikiText-2 without a
token before them, as in the nats table, and after a token that begins a document.

Run: python bench/sink_alone.py FILE.gguf --text=wiki.test.raw --before=wiki.train.tokens
         --work=FOLDER [--tokens=12800] [--out=RESULT.json]
FOLDER keeps what stands before the boundary, as for `python -m study nats`.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.plugins import module
from jaxmp.spec import parse
from jaxmp.training.evaluation.perplexity import blocks_of
from jaxmp.training.evaluation.stagewise import activations, before_first, context, last_nats
from jaxmp.training.summary import provenance
from jaxmp.wire import like
from study import nats as nats_table

STUDY = Path(__file__).resolve().parents[1] / 'configs' / 'pretrained_codecs.py'
ROW = 'klt2.3-no-sink'
BEGINS = {'nothing': [], '<|endoftext|>': [0]}
SCALES = 0.8, 1.25  # of the first token
RESTS = 0.0, 0.5, 1.5  # of its channels but the two heaviest
EARLY = 15  # tokens of a block


def variants(x, y, mean):
    """What arrives, by row: ``y`` is what the codec makes of it, ``mean`` the mean first token."""
    first = lambda a: a[:, :1]
    with_first = lambda a, rest: jnp.concatenate([a, rest[:, 1:]], 1)
    yield 'uncompressed', x
    for scale in SCALES:
        yield f'first token times {scale}', with_first(scale * first(x), x)
    heavy = jax.lax.top_k(jnp.abs(first(x)).mean((0, 1)), 2)[1]
    apart = jnp.zeros(x.shape[-1]).at[heavy].set(1)
    for scale in RESTS:
        scaled = first(x) * (apart + scale * (1 - apart))
        yield f'first token, all but its two heaviest channels times {scale}', with_first(scaled, x)
    yield 'first token as decoded', with_first(first(y), x)
    alike = with_first(jnp.broadcast_to(mean, first(x).shape), x)
    yield 'first token as the mean of all first tokens', alike
    yield 'all others as decoded', with_first(first(x), y)
    yield 'all as decoded', y


def mean_first(start, setting, model, before):
    """The mean first token of blocks of the text to learn from."""
    blocks = blocks_of(model, setting.before, 256, 16_384, 8)[:, :8]
    ahead = np.tile(np.array(before, np.int32), (len(blocks), 1))
    tokens = jnp.asarray(np.concatenate([ahead, blocks], 1), jnp.int32)
    return start(tokens)[:, 0].mean(0)


def decoder_of(row, setting):
    """``(x, key) -> y``: what the receiver of a row's messages sees."""
    channel = parse(row.fwd)
    tx, rx = nats_table.learned(row.cuts, row.learn, row.learned_tokens, setting).fwd[0]

    @jax.jit
    def decoded(x, ctx):
        message, _ = channel.send(x, tx, ctx)
        return channel.recv(message, rx, like(x), ctx)[0]

    return decoded


def rows_of(model, setting, blocks, begins, decoded):
    """A row per variant, and one of the first tokens themselves."""
    before, start = BEGINS[begins], before_first(model)
    mean, nats, norms = mean_first(start, setting, model, before), {}, []
    for i in range(0, len(blocks), 8):
        tokens = np.concatenate([np.tile(before, (8, 1)), blocks[i : i + 8]], 1)
        tokens = jnp.asarray(tokens[:, :256], jnp.int32)
        ctx, x = context(i, tokens), start(tokens)
        y = decoded(x, ctx)
        size = lambda a: np.linalg.norm(np.asarray(a), axis=-1)
        cosine = np.sum(np.asarray(x[:, 0] * y[:, 0]), -1) / size(x)[:, 0] / size(y)[:, 0]
        ratio = size(x)[:, 0] / np.median(size(x)[:, 1:], 1)
        norms.append(np.stack([ratio, size(y)[:, 0] / size(x)[:, 0], cosine]))
        for name, arrives in variants(x, y, mean):
            found = last_nats(model, activations(model, arrives, ctx)[-1], ctx)
            nats.setdefault(name, []).append(np.asarray(found, np.float64)[:, len(before) :])
    nats = {name: np.concatenate(parts) for name, parts in nats.items()}
    for name, found in nats.items():
        lost = (found - nats['uncompressed']).mean(1)
        yield {
            'begins': begins, 'row': name, 'nats': round(float(found.mean()), 4),
            'nats_lost': round(float(lost.mean()), 4),
            'standard_error': round(float(lost.std(ddof=1) / len(lost) ** 0.5), 4),
            'lost_of_the_first_15': round(
                float((found - nats['uncompressed'])[:, :EARLY].mean()), 4
            ),
        }  # fmt: skip
    names = 'first_token_over_median', 'decoded_over_its_norm', 'cosine'
    medians = np.median(np.concatenate(norms, 1), 1)
    yield {'begins': begins, **{k: round(float(v), 5) for k, v in zip(names, medians, strict=True)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('file')
    for name in ('text', 'before', 'work'):
        parser.add_argument(f'--{name}', type=Path, required=True)
    parser.add_argument('--tokens', type=int, default=12_800)
    parser.add_argument('--out', type=Path)
    a = parser.parse_args()
    setting = nats_table.Setting(str(STUDY), a.file, '', a.text, a.before, 256, 8, a.work)
    [row] = [r for r in module(str(STUDY)).get_rows() if r.name == ROW]
    model = nats_table.opened(a.file, '', row.cuts)
    blocks, decoded = blocks_of(model, a.text, 256, a.tokens, 8), decoder_of(row, setting)
    rows = []
    for begins in BEGINS:
        for found in rows_of(model, setting, blocks, begins, decoded):
            rows.append(found)
            print(json.dumps(found), flush=True)
    result = {'tokens': a.tokens, 'rows': rows, **provenance()}
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
