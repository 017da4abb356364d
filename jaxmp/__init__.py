"""jaxmp: compress what the stages of a model-parallel network send each other."""

from jaxmp import codecs
from jaxmp.boundary import Boundary, Links, boundary, init_feedback, value_and_grad
from jaxmp.codecs import *  # noqa: F403
from jaxmp.feedback import Channel, aqsgd, direct, ef, ef21, ef_mixed, warm
from jaxmp.pipeline import Pipeline, pipeline
from jaxmp.spec import SpecError, canonical, parse
from jaxmp.transport import Transport, local, ppermute
from jaxmp.version import __version__ as __version__
from jaxmp.wire import Codec, Ctx, Like, bits, like, nbytes

__all__ = [
    'Boundary',
    'Channel',
    'Codec',
    'Ctx',
    'Like',
    'Links',
    'Pipeline',
    'SpecError',
    'Transport',
    'aqsgd',
    'bits',
    'boundary',
    'canonical',
    'direct',
    'ef',
    'ef21',
    'ef_mixed',
    'init_feedback',
    'like',
    'local',
    'nbytes',
    'parse',
    'pipeline',
    'ppermute',
    'value_and_grad',
    'warm',
]
__all__ += codecs.__all__
