"""What is trained: transformers' architectures, pooling, and dropout that any world agrees on."""
