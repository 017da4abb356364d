"""Networks as tuples of stages, with no word about compression."""

from jaxmp.models.lenet import lenet
from jaxmp.models.resnet import resnet18

__all__ = ['lenet', 'resnet18']
