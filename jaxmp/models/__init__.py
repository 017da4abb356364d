"""Networks as tuples of stages; none of them depends on compression."""

from jaxmp.models.lenet import lenet
from jaxmp.models.resnet import resnet18

__all__ = ['lenet', 'resnet18']
