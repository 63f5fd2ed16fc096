"""Tensors of the Open Inference Protocol, and the models that they are the inputs of."""
