"""The small twin of ProtocolNanoGPT for `python -m study bench`: a GPT of eight stages, on bytes.

python train.py --config=text_twin
One CPU core: a minute. After a warm-up the rate is constant, so that a step is worth as much in
a longer run.
"""

from jaxmp.config import Config, load


def get_config() -> Config:
    """What differs from configs/text_gpt2.py."""
    c = load('text_gpt2')
    c.name = 'text_twin'
    c.data.sequence_length = 64
    c.model.width, c.model.blocks, c.model.stages = 64, 8, 8
    c.fwd = c.bwd = 'raw'
    c.optimizer.schedule = 'study.bench.twin:rate'
    c.optimizer.lr = 2e-3
    c.epochs = 6
    c.batch_size = 16
    return c
