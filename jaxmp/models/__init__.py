"""Networks as tuples of stages, with no word about compression."""

from jaxmp.models.resnet import resnet18

__all__ = ['resnet18']
