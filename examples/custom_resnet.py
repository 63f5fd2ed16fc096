"""A custom module to compile: ResNet-50 of transformers, here with random weights.

regauge export --module examples.custom_resnet:resnet50 --to resnet50 buckets.max_batch_size=16
regauge benchmark resnet50
"""

import torch
from transformers import ResNetConfig, ResNetForImageClassification


def resnet50():
    """Return the module and example inputs by name; the first dimension is the batch."""
    torch.manual_seed(0)
    config = ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=1000)
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 224, 224)}
