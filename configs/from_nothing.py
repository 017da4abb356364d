"""A byte GPT that learns from nothing, cut into four or into eight stages; 7 channels, 3 seeds.

jaxmp sweep configs/from_nothing.py --scale=four --out=results/from_nothing
jaxmp sweep configs/from_nothing.py --scale=eight --out=results/from_nothing
python train.py --config=configs/from_nothing.py:nvfp4

Both scales are one network on one text, Alice's Adventures in Wonderland, at one rate; what differs
is the number of boundaries, 3 or 7, and the weights with which a seed begins. It is the twin of the
study's bench, configs/text_twin.py, with as many steps, 732, but its rate falls to 0. A run takes
one to two minutes of one core, all 42 about an hour.
"""

from __future__ import annotations

from jaxmp.config import Config, load
from jaxmp.sweep.study import study_of

STAGES = {'four': 4, 'eight': 8}
SEEDS = 3
RATE = 8e-3  # of 4e-3, 8e-3 and 1.6e-2 the best of none in eight stages, seed 100
# Forward and backward. Each word is sent both ways, as in configs/few_bits.py and the study's
# bench; those of two bits are anchored, and backward unbiased, as there.
CHANNELS = {
    'none': ('raw', 'raw'),
    'uniform8': ('uniform(8)',) * 2,
    'block4': ('block(4)',) * 2,
    'nvfp4': ('nvfp4',) * 2,
    'rotated4': ('per_token(rotate(lloyd(4), 64))',) * 2,
    'outliers4': ('outliers(rotate(lloyd(4), 64), causal=True)',) * 2,
    'anchors2': study_of('few_bits').CHANNELS['anchors2'],
}


def get_config(name: str = 'none', scale: str = 'eight') -> Config:
    """A row of the study.

    Args:
      name: of `CHANNELS`.
      scale: of `STAGES`.
    """
    c = load('text_twin')
    c.name = name
    c.fwd, c.bwd = CHANNELS[name]
    c.model.stages = STAGES[scale]
    c.optimizer.update(schedule='linear', warmup='10%', lr=RATE)
    return c


def get_study(scale: str, tables: tuple[int, ...] = ()) -> list[tuple[int, Config]]:
    """The runs, as seeds and configurations: all channels with the first seed, then the second.

    Args:
      scale: of `STAGES`.
      tables: not used.

    Raises:
      ValueError: for another scale.
    """
    if scale not in STAGES:
        raise ValueError(f'no scale {scale!r}; allowed are {", ".join(STAGES)}')
    runs = []
    for seed in range(SEEDS):
        for name in CHANNELS:
            c = get_config(name, scale)
            c.seed = seed
            runs.append((seed, c))
    return runs
