"""Codecs, which say what bits are sent for a tensor, and the parts that codecs are built from.

Every codec takes one array of float16, bfloat16, float32 or float64 (`raw` takes any dtype). Every
codec but `fitted` decodes a message to the same bits in every program and on every CPU;
`jaxmp.codecs.exact` explains how.
"""

from jaxmp.codecs.companded import asinh
from jaxmp.codecs.dense import bf16, fp16, raw
from jaxmp.codecs.fitted import fitted
from jaxmp.codecs.indices import IndexCoding, bitmap, block_local, elias_fano, int32, packed
from jaxmp.codecs.lloyd import lloyd
from jaxmp.codecs.logscale import log_scale
from jaxmp.codecs.microscaling import mx, nvfp4
from jaxmp.codecs.polar import argmax, polar, polar_sign, randomised, scl
from jaxmp.codecs.rotate import rotate
from jaxmp.codecs.sign import as_bool, natural, one_bit, qsgd
from jaxmp.codecs.sparse import random_k, same_support, top_k, unbiased_random_k
from jaxmp.codecs.spikes import spikes
from jaxmp.codecs.trellis import trellis
from jaxmp.codecs.uniform import block, max_scaled, nearest, stochastic, uniform
from jaxmp.codecs.view import per_chunk, per_sample, per_token

__all__ = [
    'IndexCoding',
    'argmax',
    'as_bool',
    'asinh',
    'bf16',
    'bitmap',
    'block',
    'block_local',
    'elias_fano',
    'fitted',
    'fp16',
    'int32',
    'lloyd',
    'log_scale',
    'max_scaled',
    'mx',
    'natural',
    'nearest',
    'nvfp4',
    'one_bit',
    'packed',
    'per_chunk',
    'per_sample',
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
    'spikes',
    'stochastic',
    'top_k',
    'trellis',
    'unbiased_random_k',
    'uniform',
]
