"""python train.py --config=tests/outside/own.py: every part is one's own."""

from jaxmp.config import load

PARTS = 'tests/outside/parts.py'


def get_config():
    c = load('common')
    c.name = 'own'
    c.codecs = PARTS
    c.fwd = 'leaky(signs, keep=0.5)'
    c.bwd = 'ef(signs)'
    c.exchange = 'majority(0.5)'
    c.data.name = f'{PARTS}:moons'
    c.model.update(name=f'{PARTS}:network', width=16)
    c.metric = f'{PARTS}:margin'
    c.optimizer.update(name=f'{PARTS}:lion', schedule=f'{PARTS}:warmup', lr=1e-2)
    c.parallel.update(num_microbatches=2, replicas=2)
    c.update(epochs=8, batch_size=32)
    return c
