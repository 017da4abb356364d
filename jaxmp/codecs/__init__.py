"""What bits are sent: the codecs and the parts they are made of.

All take one array of float16, bfloat16, float32 or float64 (`raw` takes any), and all decode a
message to the same bits in every program and on every CPU, as `jaxmp.codecs.exact` explains.
"""

from jaxmp.codecs.dense import bf16, fp16, raw
from jaxmp.codecs.logscale import log_scale
from jaxmp.codecs.polar import argmax, polar, polar_sign, randomised, scl
from jaxmp.codecs.rotate import rotate
from jaxmp.codecs.sign import as_bool, natural, one_bit, qsgd
from jaxmp.codecs.sparse import (
    IndexCoding,
    bitmap,
    block_local,
    int32,
    packed,
    random_k,
    same_support,
    top_k,
    unbiased_random_k,
)
from jaxmp.codecs.uniform import block, max_scaled, nearest, stochastic, uniform
from jaxmp.codecs.view import per_token

__all__ = [
    'IndexCoding',
    'argmax',
    'as_bool',
    'bf16',
    'bitmap',
    'block',
    'block_local',
    'fp16',
    'int32',
    'log_scale',
    'max_scaled',
    'natural',
    'nearest',
    'one_bit',
    'packed',
    'per_token',
    'polar',
    'polar_sign',
    'qsgd',
    'random_k',
    'randomised',
    'raw',
    'rotate',
    'same_support',
    'scl',
    'stochastic',
    'top_k',
    'unbiased_random_k',
    'uniform',
]
