"""Codecs of 0.5 to 4 bits per element against none, on the small CIFAR-10 of the study, or text.

jaxmp sweep configs/few_bits.py --scale=cpu --out=results/few_bits --set data.dir=DIR
jaxmp sweep configs/few_bits.py --scale=text --out=results/few_bits
python train.py --config=configs/few_bits.py:trellis2 --config.data.dir=DIR

A run takes about a minute of one core, of text about four.
"""

from __future__ import annotations

from jaxmp.config import Config
from jaxmp.plugins import load

CHANNELS = {  # forward and backward
    'none': ('raw', 'raw'),
    # 2.6 bits
    'top10-fp16': ('top_k(0.1, values=fp16)',) * 2,
    'top40-log4': ('top_k(0.4, values=log_scale(4), indices=bitmap)',) * 2,
    # 2 bits
    'lloyd2': ('rotate(lloyd(2))',) * 2,
    'trellis2': ('rotate(trellis(2))',) * 2,
    # 1 bit
    'lloyd1': ('rotate(lloyd(1))',) * 2,
    'trellis1': ('rotate(trellis(1))',) * 2,
    # 4 bits
    'lloyd4': ('rotate(lloyd(4))',) * 2,
    # principal components, and what they cost
    'klt-half': ('klt(0.5)',) * 2,
    'klt1': ('klt(1)',) * 2,
    'klt2': ('klt(2)',) * 2,
    # of 96 channels 24 or 60 that are learned: 1.1 and 2.7 bits per element of the 96
    'learned24-block4': ('block(4)',) * 2,
    'learned60-block4': ('block(4)',) * 2,
}
BOTTLENECKS = {'learned24-block4': 24, 'learned60-block4': 60}  # of the text
SEEDS = {'smoke': 1, 'cpu': 5, 'text': 3}


def smoke() -> Config:
    """The digits, for two epochs: that everything runs."""
    c = load('digits_resnet')
    c.update(model={'width': 2}, data={'train_examples': 320}, epochs=2, batch_size=32)
    return c


def cpu() -> Config:
    """The setting of Tables 1-4 in `paper_tables` at the same scale: 600 steps."""
    c = load('cifar10_resnet18')
    c.data.update(pool=2, train_examples=6000, test_examples=2500)
    c.update(model={'width': 8}, epochs=10, optimizer={'cosine_epochs': 20})
    return c


def text() -> Config:
    """A GPT-2 trained from nothing on a book, byte by byte."""
    return load('text_gpt2')


SCALES = {'smoke': smoke, 'cpu': cpu, 'text': text}


def get_config(name: str = 'none', scale: str = 'cpu') -> Config:
    """A row of the study.

    Args:
      name: of `CHANNELS`.
      scale: ``smoke``, ``cpu`` or ``text``.
    """
    c = SCALES[scale]()
    fwd, bwd = CHANNELS[name]
    c.update(name=name, fwd=fwd, bwd=bwd)
    c.model.bottleneck = BOTTLENECKS.get(name, 0)
    return c


def get_study(scale: str, tables: tuple[int, ...] = (1,)) -> list[tuple[int, Config]]:
    """The runs, as seeds and configurations: all channels with the first seed, then the second."""
    del tables
    study = []
    for seed in range(SEEDS[scale]):
        for name in CHANNELS:
            if name in BOTTLENECKS and scale != 'text':
                continue  # images have as few channels as eight
            c = get_config(name, scale)
            c.seed = seed
            study.append((seed, c))
    return study
