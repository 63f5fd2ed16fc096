"""Open Inference Protocol tensors, and the models that read them."""
