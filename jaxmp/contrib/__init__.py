"""Young words and words of one paper: a file each, tested by the laws of all words.

Texts name them like any other word; see `jaxmp.spec.Later`.
"""

from jaxmp.contrib.adaptive import adaptive
from jaxmp.contrib.dct import dct
from jaxmp.contrib.demo import demo
from jaxmp.contrib.dgc import dgc
from jaxmp.contrib.frozen_adam import frozen_adam
from jaxmp.contrib.k_means import k_means

__all__ = ['adaptive', 'dct', 'demo', 'dgc', 'frozen_adam', 'k_means']
