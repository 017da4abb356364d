"""All keys with their defaults: digits, ResNet-18 of width 16, uncompressed, one program.

Every other file starts from here and states what differs. The schema, with a line per key, is
`jaxmp.config.KEYS`; `python train.py --help` prints it. The configuration is locked: a misspelt key
is refused. For keys of your own model: ``with c.unlocked(): c.model.my_key = 3``.
"""

from jaxmp.config import Config, default


def get_config() -> Config:
    """The defaults of `jaxmp.config.KEYS`."""
    return default()
