"""SmolLM2 in three tensor parallel parts: nats by the codec of the two reductions of every block.

    python bench/tensor_parallel.py FILE.gguf TEXT OUT.json [TOKENS]

The partial sums of o_proj and down_proj lie on an axis of three, by `jax.vmap` in one process, and
`jaxmp.lax.psum` adds them: 60 reductions, each of two coded hops. A block has 256 tokens, a batch
four blocks. OUT has nats lost against the sums of JAX, with a standard error over blocks, and the
share of tokens whose likeliest successor is the same.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import bits as bits_of
from jaxmp import lax, like, parse
from jaxmp.models import decoder
from jaxmp.models.layers import next_token_nats, product
from jaxmp.training.evaluation.language_model import open_language_model
from jaxmp.training.summary import provenance

PARTS, BLOCK, BATCH = 3, 256, 4
WORDS = (
    'raw', 'block(8)', 'per_token(uniform(8))', 'mx(8)',
    'outliers(rotate(lloyd(4), 64), causal=True)', 'nvfp4',
)  # fmt: skip


class Linear(decoder.Linear):
    """A product of which each device has a part of the inputs, where a block ends."""

    word = 'raw'

    @nn.compact
    def __call__(self, x):
        weight = self.param('weight', nn.initializers.normal(0.02), (self.features, x.shape[-1]))
        rows = x.reshape(-1, x.shape[-1])
        if self.name not in ('o_proj', 'down_proj'):
            return product(rows, weight).reshape(*x.shape[:-1], self.features)
        pairs = zip(jnp.split(rows, PARTS, -1), jnp.split(weight, PARTS, -1), strict=True)
        parts = jnp.stack([product(a, b) for a, b in pairs])
        add = lambda part: lax.psum(part, 'tp', fwd=Linear.word)
        return jax.vmap(add, axis_name='tp')(parts)[0].reshape(*x.shape[:-1], self.features)


def scores(stages, variables, batches):
    """Nats of each next token and the likeliest ones, of all batches."""

    @jax.jit
    def run(variables, tokens):
        y = stages[1].apply(variables[1], stages[0].apply(variables[0], tokens))
        return next_token_nats(y, tokens), jnp.argmax(y, -1)

    nats, likeliest = zip(*(run(variables, tokens) for tokens in batches), strict=True)
    return np.concatenate(nats), np.concatenate(likeliest)


def table(rows):
    """The rows in Markdown, as docs/own_collectives.md has them."""
    lines = [
        '| `fwd=` | bits an element | nats lost | the same next token, % |',
        '|---|--:|--:|--:|',
    ]
    for r in rows[1:]:
        lost = f'{r["nats_lost"]:.3f} ± {r["standard_error"]:.3f}'
        same = f'{100 * r["same_token"]:.0f}'
        lines.append(f'| `{r["codec"]}` | {r["bits"]:.2f} | {lost} | {same} |')
    return '\n'.join(lines) + '\n'


def main(file, text, out, tokens='2048'):
    decoder.Linear = Linear
    model = open_language_model(file, 0, (15,), None)
    stages: Any = model.stages  # of a decoder
    stages = [s.with_logits if s.scores else s for s in stages]
    ids = model.tokenizer.encode([Path(text).read_text()[: int(tokens) * 8]])[0][: int(tokens)]
    batches = jnp.asarray(np.asarray(ids, np.int32).reshape(-1, BATCH, BLOCK))
    rows, plain = [], None
    for Linear.word in WORDS:
        start = time.perf_counter()
        nats, likeliest = scores(stages, model.variables, batches)
        plain = plain or (nats, likeliest)
        lost = (nats - plain[0]).reshape(len(nats), -1).mean(1)
        part = like(jnp.zeros((BATCH * BLOCK // PARTS, stages[0].config.width)))
        rows.append({
            'codec': Linear.word, 'bits': round(bits_of(parse(Linear.word), part) / part.size, 3),
            'nats': float(nats.mean()), 'nats_lost': float(lost.mean()),
            'standard_error': float(lost.std(ddof=1) / len(lost) ** 0.5),
            'same_token': float((likeliest == plain[1]).mean()),
            'seconds': round(time.perf_counter() - start, 1),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    about = {'model': Path(file).name, 'text': Path(text).name, 'tokens': len(ids), 'parts': PARTS}
    Path(out).write_text(json.dumps(provenance() | about | {'rows': rows}, indent=1) + '\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
