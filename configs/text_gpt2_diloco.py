"""Replicas that meet every 30 steps, or send little in every step: four of a small GPT-2 on bytes.

XLA_FLAGS=--xla_force_host_platform_device_count=4 jaxmp sweep configs/text_gpt2_diloco.py \
    --scale=cpu --out=results/text_gpt2_diloco
python train.py --config=configs/text_gpt2_diloco.py:sparseloco
2 CPU cores: minutes per row, for as many tokens as text_gpt2.

All rows see the same tokens in the same order. Optimizers have their own rates: DeMo's signs and
1-bit Adam, which is the exchange's, come with plain SGD.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxmp.config import Config, load


class Row(NamedTuple):
    """An exchange between replicas, and the optimizer below it."""

    exchange: str
    optimizer: dict[str, Any] = {}  # noqa: RUF012


def sparse(fraction: float) -> str:
    """SparseLoCo's exchange with another fraction; 1/64 is the published one."""
    kept = f'per_chunk(top_k({fraction}, values=k_means(2), indices=elias_fano), 4096)'
    return f'diloco(30, bucketed(all_gather(ef({kept}, decay=0.95))), outer=sgd(1.0))'


BY_EXCHANGE = {'name': 'sgd', 'clip_norm': 0.0}  # the exchange is the optimizer
ROWS = {
    'adamw': Row('mean'),
    'diloco': Row('diloco(30, mean)'),
    'streaming': Row('diloco(30, all_gather(mx(4)), fragments=3, delay=5, mix=0.5)'),
    'sparseloco': Row(sparse(1 / 64)),
    'sparseloco8': Row(sparse(1 / 8)),  # few rounds need more of each
    'muloco': Row('diloco(30, bucketed(all_gather(ef(rotate(lloyd(2))))))', {'name': 'muon'}),
    'demo': Row('demo(0.0078125)', {**BY_EXCHANGE, 'lr': 1e-3}),
    'one_bit': Row('double_squeeze(one_bit)'),
    'frozen_adam': Row('frozen_adam(double_squeeze(one_bit), 2)', BY_EXCHANGE),
}
SEEDS = {'smoke': 1, 'cpu': 3}


def get_config(name: str = 'diloco', scale: str = 'cpu') -> Config:
    """A row of the study.

    Args:
      name: of `ROWS`.
      scale: ``smoke`` (three epochs of a part of the text) or ``cpu``.
    """
    c = load('text_gpt2')
    row = ROWS[name]
    c.update(name=name, fwd='raw', bwd='raw', exchange=row.exchange, optimizer=row.optimizer)
    c.parallel.replicas = 4
    if scale == 'smoke':
        c.update(model={'width': 16, 'blocks': 2, 'stages': 2}, data={'train_examples': 320})
        c.epochs = 3
    return c


def get_study(scale: str, tables: tuple[int, ...] = (1,)) -> list[tuple[int, Config]]:
    """The runs, as seeds and configurations: all rows with the first seed, then the second."""
    del tables
    study = []
    for seed in range(SEEDS[scale]):
        for name in ROWS:
            c = get_config(name, scale)
            c.seed = seed
            study.append((seed, c))
    return study
