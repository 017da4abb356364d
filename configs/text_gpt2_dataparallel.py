"""Two replicas of text_gpt2's pipeline: 4-bit boundaries inside, PowerSGD between them.

python train.py --config=configs/text_gpt2_dataparallel.py
2 CPU cores: about three minutes. Expect EXPECTED. The closing table has the bytes of both.
"""

import ml_collections

from configs import text_gpt2


def get_config() -> ml_collections.ConfigDict:
    """As text_gpt2, its batch and its text shared by the replicas."""
    c = text_gpt2.get_config()
    c.name = 'text_gpt2_dataparallel'
    del c.download  # the text is embedded
    c.replicas = 2
    c.exchange = 'power_sgd(4)'
    return c
