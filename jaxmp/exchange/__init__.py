"""Exchanges: the rules by which replicas share their gradients, and the texts that name them."""

from jaxmp.exchange.averages import all_gather, all_reduce, double_squeeze, mean, scatter_gather
from jaxmp.exchange.collectives import AXIS, Collectives, metered, over, sent
from jaxmp.exchange.hlo import operands
from jaxmp.exchange.layout import Exchange, Rule, bucketed, per_layer
from jaxmp.exchange.lowrank import power_sgd
from jaxmp.exchange.momentum import momentum
from jaxmp.exchange.outer import Outer, nesterov, sgd
from jaxmp.exchange.rounds import diloco, local_sgd
from jaxmp.exchange.settled import reduced
from jaxmp.exchange.text import RULES, parse
from jaxmp.exchange.traffic import bytes_of
from jaxmp.exchange.transformation import ExchangeState, transform

__all__ = [
    'AXIS',
    'RULES',
    'Collectives',
    'Exchange',
    'ExchangeState',
    'Outer',
    'Rule',
    'all_gather',
    'all_reduce',
    'bucketed',
    'bytes_of',
    'diloco',
    'double_squeeze',
    'local_sgd',
    'mean',
    'metered',
    'momentum',
    'nesterov',
    'operands',
    'over',
    'parse',
    'per_layer',
    'power_sgd',
    'reduced',
    'scatter_gather',
    'sent',
    'sgd',
    'transform',
]
