"""Is the gap between tests with and without compression two moments per channel? 12 rows, 5 seeds.

jaxmp sweep configs/moments.py --scale=group --out=results/moments --keep --set data.dir=DIR
jaxmp evaluate runs/sweep/group/top10-s0 --moments --batchnorm \
    --out=results/moments/group/statistics/top10-s0.png
The scale is the normaliser of a ResNet-18, `model.norm`: group, batch or none. A run takes 10 to 20
minutes of one core.
"""

from __future__ import annotations

from jaxmp.config import Config
from jaxmp.sweep.study import study_of

CODECS = {
    'top10': 'top_k(0.1)',
    'none': 'raw',
    'top20': 'top_k(0.2)',
    'ef21-top10': 'ef21(top_k(0.1))',
}
NORMS = 'group', 'batch', 'none'
SEEDS = 5


def get_study(scale: str, tables: tuple[int, ...] = ()) -> list[tuple[int, Config]]:
    """The runs, as seeds and configurations: all rows with the first seed, then with the second.

    Args:
      scale: the normaliser, of `NORMS`.
      tables: not used.

    Raises:
      ValueError: for another scale.
    """
    if scale not in NORMS:
        raise ValueError(f'no scale {scale!r}; allowed are {", ".join(NORMS)}')
    converged = study_of('paper_tables').converged
    runs = []
    for seed in range(SEEDS):
        for name, channel in CODECS.items():
            c = converged(1)
            c.update(name=name, fwd=channel, bwd=channel, seed=seed)
            c.model.norm = scale
            if scale == 'none':  # without a normaliser, Top10 % diverges at this rate
                c.optimizer.clip_norm = 1.0
            runs.append((seed, c))
    return runs
