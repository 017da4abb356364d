"""flax.nnx: modules as pipeline stages, and boundaries inside a module.

Import it by name, ``import jaxmp.nnx``: it imports `flax.nnx`, which takes a quarter of a second
and which nothing else of jaxmp needs.
"""

from jaxmp.nnx.crossing import BackwardFeedback, Crossing, ForwardFeedback, value_and_grad
from jaxmp.nnx.stage import ModuleStage, stage

__all__ = [
    'BackwardFeedback',
    'Crossing',
    'ForwardFeedback',
    'ModuleStage',
    'stage',
    'value_and_grad',
]
