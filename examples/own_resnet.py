"""A module of one's own that is compiled: ResNet-50 of transformers, here with random weights.

regauge export --module examples.own_resnet:resnet50 --to resnet50 shapes.rows=16
regauge benchmark resnet50
"""

import torch
from transformers import ResNetConfig, ResNetForImageClassification


def resnet50():
    """Return the module, and an example of each of its inputs: the first dimension is rows."""
    torch.manual_seed(0)
    config = ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=1000)
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 224, 224)}
