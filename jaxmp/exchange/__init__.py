"""Exchanges: the rules by which replicas share their gradients, and the texts that name them."""

from jaxmp.exchange.averages import all_gather, all_reduce, double_squeeze, mean, scatter_gather
from jaxmp.exchange.collectives import AXIS, Collectives, metered, over, sent
from jaxmp.exchange.delayed import dgc, local_sgd, momentum
from jaxmp.exchange.layout import Exchange, Rule, bucketed, per_layer
from jaxmp.exchange.lowrank import power_sgd
from jaxmp.exchange.text import RULES, parse
from jaxmp.exchange.traffic import bytes_of
from jaxmp.exchange.transformation import ExchangeState, transform
from jaxmp.hlo import operands

__all__ = [
    'AXIS',
    'RULES',
    'Collectives',
    'Exchange',
    'ExchangeState',
    'Rule',
    'all_gather',
    'all_reduce',
    'bucketed',
    'bytes_of',
    'dgc',
    'double_squeeze',
    'local_sgd',
    'mean',
    'metered',
    'momentum',
    'operands',
    'over',
    'parse',
    'per_layer',
    'power_sgd',
    'scatter_gather',
    'sent',
    'transform',
]
