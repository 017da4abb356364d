"""Memory of a stage and time of a step of large decoders on two machines, by formula.

    python bench/two_desks.py            # the tables of docs/two_desks.md

Nothing is measured here. Parameters are counted from the shapes of `jaxmp.models.decoder`. Beside
them a stage has, for T tokens of a micro-batch at once, with remat and products of w bytes:

    adapters    16 n            n numbers in float32: value, gradient, two moments
    inputs      4 T C L         of the L blocks of the stage
    one block   w (2 (4 T I + 10 T C + 4 Q H T) + P)

The last is a block that runs again with its gradients, Q = 128 queries at a time, and its P weights
widened. For a stage of SmolLM2 XLA counts three quarters of it (bench/results/quantised_base.json).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmp.models.decoder import Config, Kind, Lora, decoder
from jaxmp.models.pretrained import LOW_RANK
from jaxmp.wire import nbytes

GB, TOKENS, SPEED, LINK = 1e9, 2048, 40e12, 0.94e8 / 8  # flop/s of a card, bytes/s of 100 Mbit/s
OF_4_BITS = ('embed_tokens', 'q_proj', 'k_proj', 'o_proj', 'gate_proj', 'up_proj')
Q4_K_M = {  # half of the blocks have 6 bits in two kernels, for which all get the room
    **dict.fromkeys(OF_4_BITS, ('Q4_K',)), 'lm_head': ('Q6_K',),
    **dict.fromkeys(('v_proj', 'down_proj'), ('Q4_K', 'Q6_K')),
}  # fmt: skip
Q4_1 = {**dict.fromkeys(Q4_K_M, ('Q4_1',)), 'embed_tokens': ('Q8_0',)}


class Sizes(NamedTuple):
    """Of a decoder, and the kinds of its file's blocks."""

    vocabulary: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    blocks: int
    tied: bool = False
    stored: Any = Q4_K_M


MODELS = {
    'SmolLM2 135M': Sizes(49152, 576, 1536, 9, 3, 64, 30, True, Q4_1),
    'Llama 3.1 8B': Sizes(128256, 4096, 14336, 32, 8, 128, 32),
    'Qwen 2.5 32B': Sizes(152064, 5120, 27648, 40, 8, 128, 64),
    'Llama 3.1 70B': Sizes(128256, 8192, 28672, 64, 8, 128, 80),
}

LARGE = [name for name in MODELS if not MODELS[name].tied]


def stages_of(s, dtype, stages):
    """The stages of a decoder of some sizes, and the shapes of their parameters."""
    config = Config(
        *s[:6], kinds=(Kind((1.0,) * (s.head_width // 2)),), layers=(0,) * s.blocks, tied=s.tied,
        lora=Lora(8, 16), remat=True, stored=tuple(s.stored.items()) if dtype == 'file' else (),
    )  # fmt: skip
    parts = decoder(config, stages)
    tokens, x = jnp.zeros((1, 1), int), jnp.zeros((1, 1, s.width))
    init = lambda stage: jax.eval_shape(
        stage.init, jax.random.key(0), tokens if stage.embeds else x
    )
    return parts, [init(stage)['params'] for stage in parts]


def memory(s, dtype, stages, tokens=TOKENS):
    """Bytes of the largest stage, by what they are for."""
    parts, params = stages_of(s, dtype, stages)
    rows = [row(s, dtype, *one, tokens) for one in zip(parts, params, strict=True)]
    return max(rows, key=lambda r: sum(r.values()))


def row(s, dtype, stage, params, tokens, products=2):
    """Bytes of one stage; ``products`` are bytes of a number in a product."""
    of_low_rank = lambda path: getattr(path[-1], 'key', '') in LOW_RANK
    n = sum(a.size for path, a in jax.tree.leaves_with_path(params) if of_low_rank(path))
    frozen = (nbytes(params) - 4 * n) // (2 if dtype == 'bfloat16' else 1)
    block = 2 * (4 * tokens * s.inner + 10 * tokens * s.width + 4 * 128 * s.heads * tokens)
    return {
        'frozen': frozen, 'adapters': 16 * n, 'inputs': 4 * tokens * s.width * stage.blocks,
        'one block': products * (block + weights(s)),
    }  # fmt: skip


def weights(s):
    """Of a block."""
    return s.width * s.head_width * 2 * (s.heads + s.kv_heads) + 3 * s.width * s.inner


def seconds(s, bits, tokens=TOKENS):
    """Of a micro-batch on one machine that holds all, and on two in a full pipeline.

    A block runs forward, again for remat, and backward without gradients of its kernels.
    """
    attention = 2 * tokens**2 * s.heads * s.head_width
    first = 3 * s.blocks / 2 * (2 * tokens * weights(s) + attention)
    last = first + 3 * 2 * tokens * s.vocabulary * s.width
    return (first + last) / SPEED, max(last / SPEED, tokens * s.width * bits / 8 / LINK)


def memory_table():
    """GB of the larger stage in Markdown."""
    ways = {
        'bf16, two desks': ('bfloat16', 2),
        'blocks, two': ('file', 2),
        'blocks, one': ('file', 1),
    }
    lines = [f'| GB | {" | ".join(ways)} |', '|---|--:|--:|--:|']
    for name in LARGE:
        totals = (sum(memory(MODELS[name], *way).values()) / GB for way in ways.values())
        lines.append(f'| {name} | {" | ".join(f"{total:.1f}" for total in totals)} |')
    return '\n'.join(lines) + '\n'


def speed_table():
    """How much faster two machines are than one that holds all, in Markdown."""
    every = 32, 16, 4.4
    heads = ' | '.join(f'{bits} bits' for bits in every)
    lines = [f'| times as fast | {heads} |', '|---|--:|--:|--:|']
    for name in LARGE:
        pairs = (seconds(MODELS[name], bits) for bits in every)
        lines.append(f'| {name} | {" | ".join(f"{one / two:.2f}" for one, two in pairs)} |')
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    print(memory_table(), speed_table(), sep='\n')
